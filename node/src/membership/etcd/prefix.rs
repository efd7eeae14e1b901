//! Whether a prefix is free: a new cluster must not take the names of another cluster's workers.

use super::EtcdConfig;
use super::connection::{Node, connect, within};
use super::error::EtcdError;
use super::keys::Keys;
use etcd_client::GetOptions;

/// Most workers that a refusal names.
const NAMED_MAX: usize = 8;

/// Why a cluster must not be started under a prefix.
#[derive(Debug, thiserror::Error)]
pub enum PrefixError {
    /// Workers are registered there.
    #[error(
        "under {prefix} in etcd workers are registered already: {}; choose another prefix with --etcd-prefix, or, if these have ended, \
         wait until their leases end",
        named(workers, *count)
    )]
    Taken {
        prefix: String,
        /// Names of the first few workers.
        workers: Vec<String>,
        /// Number of all registered workers.
        count: usize,
    },
    /// No etcd node could be asked for the registered workers.
    #[error("cannot ask etcd at {endpoints} who is registered: {problem}; start it, or say where it is with --etcd")]
    Unknown {
        /// All nodes, asked one after the other.
        endpoints: String,
        /// The error of the last one.
        problem: String,
    },
}

fn named(workers: &[String], count: usize) -> String {
    match count.saturating_sub(workers.len()) {
        0 => workers.join(", "),
        more => format!("{} and {more} more", workers.join(", ")),
    }
}

/// Fails if a worker is registered, or if no node answers. Each node has two times `request_ms_max` to answer.
///
/// The prefix is not reserved: two clusters that start at the same time may both find it free.
pub async fn ensure_free(config: &EtcdConfig) -> Result<(), PrefixError> {
    let mut node = Node::any();
    let mut found = registered(config, node).await;
    for _ in 1..config.endpoints.len() {
        if found.is_ok() {
            break;
        }
        node = node.next();
        found = registered(config, node).await;
    }
    match found {
        Ok((_, 0)) => Ok(()),
        Ok((workers, count)) => Err(PrefixError::Taken { prefix: config.prefix.clone(), workers, count }),
        Err(error) => Err(PrefixError::Unknown { endpoints: config.endpoints.join(", "), problem: error.to_string() }),
    }
}

/// Names of the first workers with a record, and the number of records.
async fn registered(config: &EtcdConfig, node: Node) -> Result<(Vec<String>, usize), EtcdError> {
    let max = config.request_max();
    let mut client = connect(config, node, max).await?;
    let instances = Keys(config.prefix.clone()).instances();
    let options = GetOptions::new().with_prefix().with_keys_only().with_limit(NAMED_MAX as i64);
    let answer = within(max, "read", client.get(instances.clone(), Some(options))).await?;
    let name = |key: &[u8]| String::from_utf8_lossy(key.strip_prefix(instances.as_bytes()).unwrap_or(key)).into_owned();
    Ok((answer.kvs().iter().map(|kv| name(kv.key())).collect(), answer.count() as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_some_and_counts_the_rest() {
        let workers: Vec<String> = ["d-0", "d-1"].map(String::from).into();
        let taken = |count| PrefixError::Taken { prefix: "/ours/".into(), workers: workers.clone(), count }.to_string();
        assert!(taken(2).contains("already: d-0, d-1; choose another prefix"), "{}", taken(2));
        assert!(taken(5).contains("already: d-0, d-1 and 3 more; choose"), "{}", taken(5));
    }
}
