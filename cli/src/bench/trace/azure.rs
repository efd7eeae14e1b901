//! Azure's CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`. It does not record sharing, so no two prompts share a prefix.

use super::{BLOCK_TOKENS, Trace, TraceError, TraceRequest, length};
use chrono::NaiveDateTime;

/// Names of the columns, in our order.
const COLUMNS: [&str; 3] = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"];

/// The index of each of [`COLUMNS`] in a line.
type ColumnIndexes = [usize; 3];

/// Whether a line is the header.
pub(super) fn is_header(line: &str) -> bool {
    columns(line).is_some()
}

fn columns(line: &str) -> Option<ColumnIndexes> {
    let names: Vec<&str> = line.split(',').map(str::trim).collect();
    let index_of = |column: &str| names.iter().position(|name| name.eq_ignore_ascii_case(column));
    Some([index_of(COLUMNS[0])?, index_of(COLUMNS[1])?, index_of(COLUMNS[2])?])
}

/// Reads the header, then every line that is not empty.
pub(super) fn parse(text: &str) -> Result<Trace, TraceError> {
    let lines = text.trim_start_matches('\u{feff}').lines().zip(1..);
    let mut lines = lines.filter(|(line, _)| !line.trim().is_empty());
    let (header, line) = lines.next().ok_or(TraceError::Empty)?;
    let problem = || format!("no header; the first line names the columns {}", COLUMNS.join(","));
    let columns = columns(header).ok_or_else(|| TraceError::Line { line, problem: problem() })?;
    let rows = lines.map(|(line, number)| row(line, number, columns)).collect::<Result<Vec<_>, _>>()?;
    let start = rows.iter().map(|row| row.at).min().unwrap_or_default();
    let mut block = 0..;
    let requests = rows.into_iter().map(|Row { at, prompt_tokens, output_tokens }| TraceRequest {
        at: (at - start).to_std().unwrap_or_default(),
        prompt_tokens,
        output_tokens,
        // Each id is used once: nothing is shared.
        blocks: block.by_ref().take(prompt_tokens.div_ceil(BLOCK_TOKENS) as usize).collect(),
    });
    Ok(Trace { requests: requests.collect(), block_tokens: BLOCK_TOKENS, sharing_known: false })
}

struct Row {
    at: NaiveDateTime,
    prompt_tokens: u32,
    output_tokens: u32,
}

fn row(text: &str, line: usize, columns: ColumnIndexes) -> Result<Row, TraceError> {
    let wrong = |problem: String| TraceError::Line { line, problem };
    let cells: Vec<&str> = text.split(',').map(str::trim).collect();
    let cell = |column: usize| {
        let missing = || wrong(format!("no {}; each line has the columns of the first", COLUMNS[column]));
        cells.get(columns[column]).copied().ok_or_else(missing)
    };
    let tokens = |column: usize| {
        let (name, text) = (COLUMNS[column], cell(column)?);
        let count = text.parse().map_err(|_| wrong(format!("{name} is {text:?}; it is a number of tokens")))?;
        length(line, name, count)
    };
    let time = cell(0)?;
    let at = time_of(time)
        .ok_or_else(|| wrong(format!("{} is {time:?}; it looks like 2023-11-16 18:17:03.9799600", COLUMNS[0])))?;
    Ok(Row { at, prompt_tokens: tokens(1)?, output_tokens: tokens(2)? })
}

/// A time of day in UTC: the release of 2023 writes no zone, that of 2024 writes `+00:00`.
fn time_of(text: &str) -> Option<NaiveDateTime> {
    let text = text.strip_suffix("+00:00").or_else(|| text.strip_suffix('Z')).unwrap_or(text);
    ["%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%dT%H:%M:%S%.f"]
        .iter()
        .find_map(|form| NaiveDateTime::parse_from_str(text, form).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn lines_become_requests_that_share_nothing() {
        let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.9799600,1025,10\n\
                    2023-11-17 00:00:00.0319600,512,8\n\n2024-05-10 00:00:00.009930+00:00,1,2";
        let trace = parse(text).unwrap();
        let told: Vec<_> =
            trace.requests.iter().map(|r| (r.prompt_tokens, r.output_tokens, r.blocks.clone())).collect();
        assert_eq!(told, [(1_025, 10, vec![0, 1, 2]), (512, 8, vec![3]), (1, 2, vec![4])]);
        assert_eq!(trace.requests[1].at, Duration::from_millis(52));
        assert!(!trace.sharing_known);
    }

    #[test]
    fn columns_stand_where_the_header_says() {
        let trace = parse("GeneratedTokens,x,TIMESTAMP,ContextTokens\n7,y,2023-11-16 18:17:03,20\n").unwrap();
        assert_eq!((trace.requests[0].prompt_tokens, trace.requests[0].output_tokens), (20, 7));
    }

    #[test]
    fn a_wrong_line_is_named_and_says_what_is_wanted() {
        let check = |line: &str, expected: &str| {
            let told = parse(&format!("TIMESTAMP,ContextTokens,GeneratedTokens\n\n{line}")).unwrap_err().to_string();
            assert!(told.starts_with("line 3: ") && told.contains(expected), "{told}");
        };
        check("yesterday,4,4", "TIMESTAMP is \"yesterday\"; it looks like");
        check("2023-11-16 18:17:03,four,4", "ContextTokens is \"four\"");
        check("2023-11-16 18:17:03,4", "no GeneratedTokens");
        check("2023-11-16 18:17:03,4,0", "GeneratedTokens is 0");
    }
}
