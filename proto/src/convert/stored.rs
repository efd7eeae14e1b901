//! Protobuf stored outside of calls: instance records and routers' verdicts in etcd, and a router's local copy of etcd's records on disk.

use super::ConvertError;
use crate::v1::{self, join_response};
use baton_types::InstanceRecord;
use prost::{DecodeError, Message as _};

/// A router's verdict on a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RouterVerdict {
    /// The router places work on it.
    Admitted,
    /// The router does not, with the reason.
    Evicted(String),
}

/// etcd's records as they were last read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CachedView {
    /// Key prefix.
    pub prefix: String,
    /// Id of the etcd cluster.
    pub cluster: u64,
    /// Epoch of the prefix.
    pub epoch: u64,
    /// Revision that was read.
    pub revision: i64,
    /// Each record with the revision at which it was written.
    pub members: Vec<(InstanceRecord, u64)>,
}

/// Why bytes cannot be decoded.
#[derive(Debug, thiserror::Error)]
pub enum StoredError {
    /// They are not a protobuf message.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// A field of it is missing or wrong.
    #[error(transparent)]
    Convert(#[from] ConvertError),
}

/// Encodes a record.
pub fn encode_record(record: &InstanceRecord) -> Vec<u8> {
    v1::InstanceRecord::from(record.clone()).encode_to_vec()
}

/// Decodes a record, of any protocol version.
///
/// # Errors
/// If the bytes are not a record: any client with write access to a store may write anything.
pub fn decode_record(bytes: &[u8]) -> Result<InstanceRecord, StoredError> {
    let record = v1::InstanceRecord::decode(bytes)?;
    Ok(InstanceRecord::try_from(record).map_err(|e| e.within("record"))?)
}

/// Encodes a verdict.
pub fn encode_verdict(verdict: &RouterVerdict) -> Vec<u8> {
    v1::JoinResponse { message: Some(verdict.clone().into()) }.encode_to_vec()
}

/// Decodes a verdict; `None` for one of a newer protocol.
pub fn decode_verdict(bytes: &[u8]) -> Option<RouterVerdict> {
    match v1::JoinResponse::decode(bytes).ok()?.message? {
        join_response::Message::Admitted(_) => Some(RouterVerdict::Admitted),
        join_response::Message::Evicted(v1::Evicted { reason }) => Some(RouterVerdict::Evicted(reason)),
        _ => None,
    }
}

impl From<RouterVerdict> for join_response::Message {
    fn from(verdict: RouterVerdict) -> Self {
        match verdict {
            RouterVerdict::Admitted => Self::Admitted(v1::Admitted {}),
            RouterVerdict::Evicted(reason) => Self::Evicted(v1::Evicted { reason }),
        }
    }
}

/// Encodes a view.
pub fn encode_view(view: CachedView) -> Vec<u8> {
    let CachedView { prefix, cluster, epoch, revision, members } = view;
    let member = |(record, revision): (InstanceRecord, u64)| v1::CachedMember { record: Some(record.into()), revision };
    let members = members.into_iter().map(member).collect();
    v1::CachedView { prefix, cluster, epoch, revision, members }.encode_to_vec()
}

/// Decodes a view. Records that cannot be decoded are left out.
///
/// # Errors
/// If the bytes are not a view.
pub fn decode_view(bytes: &[u8]) -> Result<CachedView, StoredError> {
    let v1::CachedView { prefix, cluster, epoch, revision, members } = v1::CachedView::decode(bytes)?;
    let member = |member: v1::CachedMember| Some((InstanceRecord::try_from(member.record?).ok()?, member.revision));
    let members = members.into_iter().filter_map(member).collect();
    Ok(CachedView { prefix, cluster, epoch, revision, members })
}
