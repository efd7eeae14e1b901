//! Prometheus' older text format, converted from OpenMetrics, for scrapers that request no format.

/// Content type of OpenMetrics.
pub(super) const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Content type of the older format.
pub(super) const PLAIN: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Whether a client that sends this `accept` reads OpenMetrics.
pub(super) fn is_open_metrics(accept: &str) -> bool {
    accept.split(',').any(|kind| kind.trim_ascii_start().starts_with("application/openmetrics-text"))
}

/// The same metrics in the older format: it names families like their samples, has fewer types, and neither units nor
/// an end mark.
pub(super) fn plain(open_metrics: &str) -> String {
    let (mut plain, mut help) = (String::with_capacity(open_metrics.len()), None);
    for line in open_metrics.lines() {
        let comment = line.strip_prefix("# ").map(|comment| comment.splitn(3, ' ').collect::<Vec<_>>());
        match comment.as_deref() {
            Some(["HELP", family, text]) => help = Some((*family, *text)),
            Some(["TYPE", family, kind]) => {
                let (suffix, kind) = match *kind {
                    "counter" => ("_total", "counter"),
                    "info" => ("_info", "gauge"),
                    "stateset" => ("", "gauge"),
                    "unknown" => ("", "untyped"),
                    kind => ("", kind),
                };
                if let Some((_, text)) = help.take().filter(|(of, _)| of == family) {
                    plain += &format!("# HELP {family}{suffix} {text}\n");
                }
                plain += &format!("# TYPE {family}{suffix} {kind}\n");
            }
            Some(_) => {}
            None => {
                plain += line;
                plain.push('\n');
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_named_like_their_samples() {
        let open_metrics = "\
# HELP a_things Things, all of them.
# TYPE a_things counter
a_things_total{of=\"x # y\"} 3
# HELP a_build What runs.
# TYPE a_build info
a_build_info{version=\"1\"} 1
# HELP a_wait_seconds Waits.
# TYPE a_wait_seconds histogram
# UNIT a_wait_seconds seconds
a_wait_seconds_sum 0.5
a_wait_seconds_count 1
a_wait_seconds_bucket{le=\"+Inf\"} 1
# EOF
";
        let expected = "\
# HELP a_things_total Things, all of them.
# TYPE a_things_total counter
a_things_total{of=\"x # y\"} 3
# HELP a_build_info What runs.
# TYPE a_build_info gauge
a_build_info{version=\"1\"} 1
# HELP a_wait_seconds Waits.
# TYPE a_wait_seconds histogram
a_wait_seconds_sum 0.5
a_wait_seconds_count 1
a_wait_seconds_bucket{le=\"+Inf\"} 1
";
        assert_eq!(plain(open_metrics), expected);
    }

    #[test]
    fn open_metrics_is_for_who_asks_for_it() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        assert!(is_open_metrics(prometheus) && is_open_metrics("text/plain;q=0.9, application/openmetrics-text"));
        for other in ["", "*/*", "text/plain", "text/html,application/xml;q=0.9,*/*;q=0.8"] {
            assert!(!is_open_metrics(other), "{other}");
        }
    }
}
