//! The result of a check: what was found, its verdict, and the remedy.

use serde::Serialize;
use std::fmt::Write as _;

/// The verdict of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    /// As it should be.
    Ok,
    /// Not present, and not requested.
    Absent,
    /// Works, but worse than it could.
    Warning,
    /// Baton would not work here as requested.
    Failure,
}

impl Verdict {
    const fn mark(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Absent => "-",
            Self::Warning => "WARN",
            Self::Failure => "FAIL",
        }
    }

    /// `self` if the thing was requested, [`Verdict::Absent`] if not.
    pub(super) const fn if_wanted(self, wanted: bool) -> Self {
        if wanted { self } else { Self::Absent }
    }
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    /// What was checked, e.g. `memlock`.
    pub(super) check: String,
    pub(super) verdict: Verdict,
    pub(super) found: String,
    /// The remedy; every warning and failure has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) remedy: Option<String>,
}

impl Finding {
    pub(super) fn ok(check: impl Into<String>, found: impl Into<String>) -> Self {
        Self { check: check.into(), verdict: Verdict::Ok, found: found.into(), remedy: None }
    }

    pub(super) fn new(
        check: impl Into<String>,
        verdict: Verdict,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { check: check.into(), verdict, found: found.into(), remedy: Some(remedy.into()) }
    }
}

/// A table of all findings; remedies are below the findings that they belong to.
pub(super) fn report(findings: &[Finding]) -> String {
    let width = findings.iter().map(|f| f.check.len()).max().unwrap_or(0);
    let mut text = String::new();
    for Finding { check, verdict, found, remedy } in findings {
        // Writing into a String cannot fail.
        let _ = writeln!(text, "{:4}  {check:width$}  {found}", verdict.mark());
        let remedy = remedy.as_ref().filter(|_| *verdict >= Verdict::Warning);
        if let Some(remedy) = remedy {
            let _ = writeln!(text, "      {:width$}  -> {remedy}", "");
        }
    }
    text
}

/// The worst of all.
pub(super) fn worst(findings: &[Finding]) -> Verdict {
    findings.iter().map(|f| f.verdict).max().unwrap_or(Verdict::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_names_what_to_do_where_something_is_to_do() {
        let findings = [
            Finding::ok("cpu", "AVX2"),
            Finding::new("gpu", Verdict::Absent, "none", "install a driver"),
            Finding::new("memlock", Verdict::Failure, "64 KiB", "raise it"),
        ];
        let expected = "ok    cpu      AVX2\n-     gpu      none\nFAIL  memlock  64 KiB\n               -> raise it\n";
        assert_eq!(report(&findings), expected);
        assert_eq!(worst(&findings), Verdict::Failure);
        assert_eq!(worst(&findings[..2]), Verdict::Absent);
    }
}
