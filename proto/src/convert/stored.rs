//! What is kept as protobuf outside of calls: records and words of routers in etcd, and what a router remembers of etcd on its disk.

use super::ConvertError;
use crate::v1::{self, join_response};
use baton_types::InstanceRecord;
use prost::{DecodeError, Message as _};

/// A router's word on a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// It places work here.
    Admitted,
    /// It does not, and why.
    Evicted(String),
}

/// A view of etcd as it was last read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RememberedView {
    /// Prefix of the keys.
    pub prefix: String,
    /// Id of the cluster of etcd.
    pub cluster: u64,
    /// Epoch of the prefix.
    pub epoch: u64,
    /// Revision that was read.
    pub revision: i64,
    /// Each record with the revision that wrote it.
    pub members: Vec<(InstanceRecord, u64)>,
}

/// Why bytes are no record.
#[derive(Debug, thiserror::Error)]
pub enum StoredError {
    /// They are no message.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// A field of it is missing or wrong.
    #[error(transparent)]
    Convert(#[from] ConvertError),
}

/// A record as bytes.
pub fn encode_record(record: &InstanceRecord) -> Vec<u8> {
    v1::InstanceRecord::from(record.clone()).encode_to_vec()
}

/// The record, of whatever protocol.
///
/// # Errors
/// Where the bytes are none: whoever may write to a store may write anything.
pub fn decode_record(bytes: &[u8]) -> Result<InstanceRecord, StoredError> {
    let record = v1::InstanceRecord::decode(bytes)?;
    Ok(InstanceRecord::try_from(record).map_err(|e| e.within("record"))?)
}

/// A word as bytes.
pub fn encode_word(word: &Word) -> Vec<u8> {
    v1::JoinResponse { message: Some(word.clone().into()) }.encode_to_vec()
}

/// `None` for words of a newer protocol.
pub fn decode_word(bytes: &[u8]) -> Option<Word> {
    match v1::JoinResponse::decode(bytes).ok()?.message? {
        join_response::Message::Admitted(_) => Some(Word::Admitted),
        join_response::Message::Evicted(v1::Evicted { reason }) => Some(Word::Evicted(reason)),
        _ => None,
    }
}

impl From<Word> for join_response::Message {
    fn from(word: Word) -> Self {
        match word {
            Word::Admitted => Self::Admitted(v1::Admitted {}),
            Word::Evicted(reason) => Self::Evicted(v1::Evicted { reason }),
        }
    }
}

/// A view as bytes.
pub fn encode_view(view: RememberedView) -> Vec<u8> {
    let RememberedView { prefix, cluster, epoch, revision, members } = view;
    let member =
        |(record, revision): (InstanceRecord, u64)| v1::RememberedMember { record: Some(record.into()), revision };
    let members = members.into_iter().map(member).collect();
    v1::RememberedView { prefix, cluster, epoch, revision, members }.encode_to_vec()
}

/// The view. Records that cannot be read are left out.
///
/// # Errors
/// Where the bytes are no view.
pub fn decode_view(bytes: &[u8]) -> Result<RememberedView, StoredError> {
    let v1::RememberedView { prefix, cluster, epoch, revision, members } = v1::RememberedView::decode(bytes)?;
    let member = |member: v1::RememberedMember| Some((InstanceRecord::try_from(member.record?).ok()?, member.revision));
    let members = members.into_iter().filter_map(member).collect();
    Ok(RememberedView { prefix, cluster, epoch, revision, members })
}
