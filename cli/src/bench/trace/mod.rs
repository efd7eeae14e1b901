//! Recorded requests: their arrival times, the lengths of prompt and answer, and which parts of prompts are equal.

mod azure;
mod error;
mod infinite;
mod mooncake;

use clap::ValueEnum;
pub(crate) use error::TraceError;
pub(crate) use infinite::InfiniteCache;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::time::Duration;

/// Tokens of a block if the format does not state it: Mooncake's size, also used for traces without blocks.
pub(crate) const BLOCK_TOKENS: u32 = 512;
/// Largest file: a hundred times an hour of real traffic.
const FILE_BYTES_MAX: u64 = 1 << 30;
/// Most requests of a trace.
const REQUESTS_MAX: usize = 4_000_000;
/// Longest prompt or answer, in tokens: far above any model's context, and far below what 32 bits hold.
const TOKENS_MAX: u32 = 1 << 26;

/// How a trace is written.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Format {
    /// JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one id per 512 tokens.
    Mooncake,
    /// CSV with `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`; it has no information on shared prefixes.
    Azure,
}

/// Requests in order of arrival, the first one at time 0.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Trace {
    /// In order of arrival.
    pub(crate) requests: Vec<TraceRequest>,
    /// Tokens per id of [`TraceRequest::blocks`]; the last id of a prompt may stand for fewer.
    pub(crate) block_tokens: u32,
    /// Whether the file records which blocks prompts share. If not, no two requests have a block in common.
    pub(crate) sharing_known: bool,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct TraceRequest {
    /// Arrival, relative to the first request's.
    pub(crate) at: Duration,
    /// Tokens of the prompt, at least 1.
    pub(crate) prompt_tokens: u32,
    /// Tokens of the answer, at least 1.
    pub(crate) output_tokens: u32,
    /// One id per [`Trace::block_tokens`] tokens of the prompt; the last block may be shorter. Prompts whose first ids are equal have
    /// equal tokens there.
    pub(crate) blocks: Vec<u64>,
}

impl Trace {
    /// Reads a file, in the given format or in the one detected from its first line.
    ///
    /// # Errors
    /// [`TraceError`], with the line and what to do.
    pub(crate) fn read(path: &Path, format: Option<Format>) -> Result<Self, TraceError> {
        let unreadable = |source| TraceError::Read { path: path.to_owned(), source };
        let file = File::open(path).map_err(unreadable)?;
        let mut text = String::new();
        file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(unreadable)?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(TraceError::Size { gib_max: FILE_BYTES_MAX >> 30 });
        }
        Self::parse(&text, format)
    }

    /// Parses the text of a file.
    pub(crate) fn parse(text: &str, format: Option<Format>) -> Result<Self, TraceError> {
        let format = format.or_else(|| guess(text)).ok_or(TraceError::Format)?;
        let mut trace = match format {
            Format::Mooncake => mooncake::parse(text)?,
            Format::Azure => azure::parse(text)?,
        };
        if trace.requests.is_empty() {
            return Err(TraceError::Empty);
        }
        if trace.requests.len() > REQUESTS_MAX {
            return Err(TraceError::Requests { max: REQUESTS_MAX });
        }
        trace.in_order();
        Ok(trace)
    }

    /// Sorts requests by arrival, keeping the order of equal ones, and makes times relative to the first.
    pub(crate) fn in_order(&mut self) {
        self.requests.sort_by_key(|request| request.at);
        let start = self.requests.first().map_or(Duration::ZERO, |first| first.at);
        self.requests.iter_mut().for_each(|request| request.at -= start);
    }

    /// Time from the first arrival to the last.
    pub(crate) fn span(&self) -> Duration {
        self.requests.last().map_or(Duration::ZERO, |last| last.at)
    }
}

impl TraceRequest {
    /// Tokens of block `index` of this prompt: a full block, or the rest in the last one.
    pub(crate) fn tokens_of_block(&self, index: usize, block_tokens: u32) -> u32 {
        let before = (index as u64).saturating_mul(block_tokens.into());
        u64::from(self.prompt_tokens).saturating_sub(before).min(block_tokens.into()) as u32
    }
}

/// The format detected from the first line.
fn guess(text: &str) -> Option<Format> {
    let first = text.trim_start_matches('\u{feff}').lines().find(|line| !line.trim().is_empty())?.trim();
    if first.starts_with('{') {
        return Some(Format::Mooncake);
    }
    azure::is_header(first).then_some(Format::Azure)
}

/// A length in tokens, in either format: 1 to [`TOKENS_MAX`].
fn length(line: usize, field: &'static str, tokens: u64) -> Result<u32, TraceError> {
    u32::try_from(tokens).ok().filter(|tokens| (1..=TOKENS_MAX).contains(tokens)).ok_or_else(|| TraceError::Line {
        line,
        problem: format!("{field} is {tokens}; take out requests without tokens, or with more than {TOKENS_MAX}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_tells_the_format() {
        let mooncake = r#"{"timestamp": 5, "input_length": 3, "output_length": 1, "hash_ids": [0]}"#;
        assert!(Trace::parse(mooncake, None).unwrap().sharing_known);
        let azure = "\u{feff}TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,48,10\r\n";
        assert!(!Trace::parse(azure, None).unwrap().sharing_known);
        assert!(matches!(Trace::parse("a,b\n1,2\n", None), Err(TraceError::Format)));
        assert!(matches!(Trace::parse(azure, Some(Format::Mooncake)), Err(TraceError::Line { line: 1, .. })));
        assert!(matches!(Trace::parse("TIMESTAMP,ContextTokens,GeneratedTokens\n", None), Err(TraceError::Empty)));
        assert!(matches!(Trace::parse(" \n", None), Err(TraceError::Format)));
    }

    #[test]
    fn requests_come_in_order_from_time_zero() {
        let line = |at: u32, id: u32| {
            format!(r#"{{"timestamp": {at}, "input_length": 3, "output_length": 1, "hash_ids": [{id}]}}"#)
        };
        let trace = Trace::parse(&[line(900, 1), line(500, 2), line(900, 3)].join("\n"), None).unwrap();
        let order: Vec<_> = trace.requests.iter().map(|r| (r.at.as_millis(), r.blocks[0])).collect();
        assert_eq!(order, [(0, 2), (400, 1), (400, 3)]);
        assert_eq!(trace.span(), Duration::from_millis(400));
    }

    #[test]
    fn the_last_block_is_cut() {
        let request =
            TraceRequest { at: Duration::ZERO, prompt_tokens: 1_030, output_tokens: 1, blocks: vec![7, 8, 9] };
        assert_eq!([0, 1, 2, 3].map(|block| request.tokens_of_block(block, 512)), [512, 512, 6, 0]);
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let error = Trace::read(Path::new("/nowhere/trace.jsonl"), None).unwrap_err().to_string();
        assert!(error.contains("/nowhere/trace.jsonl"), "{error}");
    }
}
