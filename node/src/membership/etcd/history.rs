//! Reads the records, and the position in etcd's history at which they were read.

use super::connection::within;
use super::error::EtcdError;
use super::keys::{Keys, decode_usable};
use super::view::Position;
use crate::membership::{Member, Registration};
use etcd_client::{Client, Compare, CompareOp, GetOptions, KeyValue, Txn, TxnOp, TxnOpResponse};
use std::sync::Arc;
use std::time::Duration;

/// etcd's current position; `None` if it has no epoch: it was wiped.
pub(super) async fn stand(client: &Client, keys: &Keys, max: Duration) -> Result<Option<Position>, EtcdError> {
    let answer = within(max, "read", client.kv_client().get(keys.epoch(), None)).await?;
    let header = answer.header().map(|h| (h.cluster_id(), h.revision()));
    let epoch = answer.kvs().first().map(epoch_of);
    Ok(header.zip(epoch).map(|((cluster, revision), epoch)| Position { cluster, epoch, revision }))
}

/// All records, and the position at which they were read. It draws the epoch only if there is none: an etcd without
/// space refuses every transaction that may write.
pub(super) async fn list(client: &Client, keys: &Keys, max: Duration) -> Result<(Position, Vec<Member>), EtcdError> {
    let epoch = keys.epoch();
    if stand(client, keys, max).await?.is_none() {
        let missing = Compare::create_revision(epoch.clone(), CompareOp::Equal, 0);
        let draw = TxnOp::put(epoch.clone(), format!("{:016x}", rand::random::<u64>()), None);
        within(max, "draw the epoch", client.kv_client().txn(Txn::new().when([missing]).and_then([draw]))).await?;
    }

    let reads = [TxnOp::get(epoch, None), TxnOp::get(keys.instances(), Some(GetOptions::new().with_prefix()))];
    let answer = within(max, "list", client.kv_client().txn(Txn::new().and_then(reads))).await?;
    let (cluster, revision) = answer.header().map_or((0, 0), |h| (h.cluster_id(), h.revision()));
    let mut gets = answer.op_responses().into_iter().filter_map(|r| match r {
        TxnOpResponse::Get(get) => Some(get.kvs().to_vec()),
        _ => None,
    });
    let epoch = gets.next().unwrap_or_default().first().map_or(0, epoch_of);
    let prefix = keys.instances();
    let members = gets.next().unwrap_or_default().iter().filter_map(|kv| member(&prefix, kv)).collect();
    Ok((Position { cluster, epoch, revision }, members))
}

fn epoch_of(kv: &KeyValue) -> u64 {
    kv.value_str().ok().and_then(|v| u64::from_str_radix(v, 16).ok()).unwrap_or(0)
}

/// The member that a record describes; `None`, and a warning, if it cannot be used.
pub(super) fn member(prefix: &str, kv: &KeyValue) -> Option<Member> {
    let name = kv.key().strip_prefix(prefix.as_bytes()).unwrap_or_default();
    match decode_usable(name, kv.value()) {
        Ok(record) => {
            let registration =
                Registration { incarnation: record.party.incarnation, revision: kv.mod_revision() as u64 };
            Some(Member { record: Arc::new(record), registration })
        }
        Err(problem) => {
            tracing::warn!(instance = %String::from_utf8_lossy(name), problem, "leaves out a record");
            None
        }
    }
}
