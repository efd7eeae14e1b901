//! An etcd without space, and how an operator frees some.

use super::EtcdServer;
use etcd_client::{AlarmAction, AlarmOptions, AlarmType, Client, CompactionOptions, DeleteOptions, Error};

/// Prefix of the ballast keys.
const BALLAST: &str = "/fill/";
/// Bytes of one ballast value. The most values that are written are far more than any test's quota.
const PIECE_BYTES: usize = 200_000;
const PIECES_MAX: usize = 1_000;

/// Writes until etcd refuses; returns whether it did.
pub async fn fill(client: &mut Client) -> bool {
    for piece in 0..PIECES_MAX {
        if client.put(format!("{BALLAST}{piece}"), vec![b'x'; PIECE_BYTES], None).await.is_err() {
            return true;
        }
    }
    false
}

impl EtcdServer {
    /// A connection to this node only.
    pub async fn client(&self) -> Result<Client, Error> {
        Client::connect([self.url()], None).await
    }
}

/// Frees space on all `nodes` of a cluster: deletes, compacts, defragments each and ends the alarms.
pub async fn make_space(nodes: &[&EtcdServer]) -> Result<(), Error> {
    let mut first = nodes[0].client().await?;
    let deleted = first.delete(BALLAST, Some(DeleteOptions::new().with_prefix())).await?;
    let revision = deleted.header().map_or(1, etcd_client::ResponseHeader::revision);
    first.compact(revision, Some(CompactionOptions::new().with_physical())).await?;
    for node in nodes {
        node.client().await?.defragment().await?;
    }
    let alarms = first.alarm(AlarmAction::Get, AlarmType::Nospace, None).await?;
    for alarm in alarms.alarms() {
        let mut of_member = AlarmOptions::new();
        of_member.with_member(alarm.member_id());
        first.alarm(AlarmAction::Deactivate, AlarmType::Nospace, Some(of_member)).await?;
    }
    first.put(format!("{BALLAST}0"), "there is space", None).await?;
    Ok(())
}
