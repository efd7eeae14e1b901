//! The nodes of etcd.

use super::finding::{Finding, Verdict};
use baton_node::membership::etcd::{Reached, reach};
use std::time::Duration;

/// A read through the leader within one datacenter takes a few milliseconds. Leases of seconds tolerate more; drains and joins become
/// slower.
const READ_MAX: Duration = Duration::from_millis(50);

/// Queries each node. One that answers is enough for a process to start and serve, so for the others there is only a warning.
pub(super) async fn look(endpoints: Vec<String>) -> anyhow::Result<Vec<Finding>> {
    let config = crate::etcd::config(endpoints, None)?;
    Ok(nodes(reach(&config).await))
}

fn nodes(reached: Vec<(String, Result<Reached, String>)>) -> Vec<Finding> {
    let silent = if reached.iter().any(|(_, reached)| reached.is_ok()) { Verdict::Warning } else { Verdict::Failure };
    reached.into_iter().map(|(endpoint, reached)| node(&endpoint, reached, silent)).collect()
}

fn node(endpoint: &str, reached: Result<Reached, String>, silent: Verdict) -> Finding {
    let check = format!("etcd {endpoint}");
    match reached {
        Err(error) => {
            let remedy = "start it, open its client port in the firewall, and set BATON_MEMBERSHIP__ETCD__CA, CERT, KEY, USER and PASSWORD_FILE if it requires them";
            Finding::new(check, silent, error, remedy)
        }
        Ok(Reached { version, read }) => {
            let found = format!("{version}, a read takes {:.1} ms", read.as_secs_f64() * 1e3);
            if read <= READ_MAX {
                return Finding::ok(check, found);
            }
            let remedy = "give etcd disks of its own (fsync under 10 ms) and keep it in the workers' datacenter";
            Finding::new(check, Verdict::Warning, found, remedy)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_and_silent_nodes_are_told() {
        let reached = |ms| Ok(Reached { version: "3.5.17".into(), read: Duration::from_millis(ms) });
        let verdicts = |of: Vec<Result<Reached, String>>| -> Vec<Verdict> {
            nodes(of.into_iter().map(|r| ("http://a:2379".to_owned(), r)).collect()).iter().map(|f| f.verdict).collect()
        };
        assert_eq!(verdicts(vec![reached(3)]), [Verdict::Ok]);
        assert_eq!(verdicts(vec![reached(300)]), [Verdict::Warning]);
        assert_eq!(verdicts(vec![Err("silent".into())]), [Verdict::Failure]);
        assert_eq!(verdicts(vec![Err("silent".into()), reached(3)]), [Verdict::Warning, Verdict::Ok]);
        assert_eq!(verdicts(vec![Err("silent".into()), Err("silent".into())]), [Verdict::Failure, Verdict::Failure]);
    }

    #[tokio::test]
    async fn a_node_that_is_not_there_is_a_finding() {
        let findings = look(vec!["http://127.0.0.1:1".into()]).await.unwrap();
        assert_eq!((findings.len(), findings[0].verdict), (1, Verdict::Failure), "{findings:?}");
        assert!(look(vec!["127.0.0.1:1".into()]).await.is_err(), "no address of etcd");
    }
}
