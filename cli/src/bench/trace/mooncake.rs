//! Mooncake's JSON lines: `{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [id, ..]}`.

use super::{BLOCK_TOKENS, Trace, TraceError, TraceRequest, length};
use serde::Deserialize;
use std::time::Duration;

/// A line; further fields are ignored.
#[derive(Deserialize)]
struct Line {
    /// Milliseconds, in some releases with a fraction.
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

/// Reads every line that is not empty.
pub(super) fn parse(text: &str) -> Result<Trace, TraceError> {
    let lines = text.trim_start_matches('\u{feff}').lines().zip(1..).filter(|(line, _)| !line.trim().is_empty());
    let requests = lines.map(|(line, number)| request(line, number)).collect::<Result<Vec<_>, _>>()?;
    Ok(Trace { requests, block_tokens: BLOCK_TOKENS, sharing_known: true })
}

fn request(text: &str, line: usize) -> Result<TraceRequest, TraceError> {
    let wrong = |problem: String| TraceError::Line { line, problem };
    let read: Line = serde_json::from_str(text).map_err(|error| {
        wrong(format!(
            "{error}; a line is one JSON object with timestamp, input_length, output_length and hash_ids, as in Mooncake's traces"
        ))
    })?;
    let at = Duration::try_from_secs_f64(read.timestamp / 1e3)
        .map_err(|_| wrong(format!("timestamp is {}; it must be milliseconds, 0 or more", read.timestamp)))?;
    let prompt_tokens = length(line, "input_length", read.input_length)?;
    let output_tokens = length(line, "output_length", read.output_length)?;
    let expected = prompt_tokens.div_ceil(BLOCK_TOKENS) as usize;
    if read.hash_ids.len() != expected {
        return Err(wrong(format!(
            "{} hash_ids for {prompt_tokens} tokens; {expected} are needed, one for each {BLOCK_TOKENS} tokens begun",
            read.hash_ids.len()
        )));
    }
    Ok(TraceRequest { at, prompt_tokens, output_tokens, blocks: read.hash_ids })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_requests() {
        let text = r#"
{"timestamp": 0, "input_length": 1025, "output_length": 500, "hash_ids": [0, 1, 2]}

{"timestamp": 1500.5, "input_length": 512, "output_length": 1, "hash_ids": [46], "session": "x"}
"#;
        let trace = parse(text).unwrap();
        assert_eq!((trace.block_tokens, trace.requests.len()), (512, 2));
        let [first, second] = &trace.requests[..] else { unreachable!() };
        assert_eq!((first.prompt_tokens, first.output_tokens, &first.blocks[..]), (1_025, 500, &[0, 1, 2][..]));
        assert_eq!((second.at, &second.blocks[..]), (Duration::from_micros(1_500_500), &[46][..]));
    }

    #[test]
    fn a_wrong_line_is_named_and_says_what_is_wanted() {
        let check = |line: &str, expected: &str| {
            let good = r#"{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [0]}"#;
            let told = parse(&format!("{good}\n{line}\n")).unwrap_err().to_string();
            assert!(told.starts_with("line 2: ") && told.contains(expected), "{told}");
        };
        check("{", "one JSON object");
        check(r#"{"timestamp": 0, "input_length": 5, "output_length": 5}"#, "hash_ids");
        check(r#"{"timestamp": -1, "input_length": 5, "output_length": 5, "hash_ids": [0]}"#, "timestamp is -1");
        check(r#"{"timestamp": 0, "input_length": 513, "output_length": 5, "hash_ids": [0]}"#, "1 hash_ids for 513");
        check(r#"{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [0, 1]}"#, "2 hash_ids for 5");
        check(r#"{"timestamp": 0, "input_length": 0, "output_length": 5, "hash_ids": []}"#, "input_length is 0");
        check(r#"{"timestamp": 0, "input_length": 5, "output_length": 99999999999, "hash_ids": [0]}"#, "output_length");
    }
}
