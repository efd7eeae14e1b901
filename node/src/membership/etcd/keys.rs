//! Names and values of keys.

use baton_proto::convert::stored;
use baton_types::{InstanceId, InstanceRecord, Party, ProtocolRange};

/// Keys below a cluster's prefix.
#[derive(Clone, Debug)]
pub(super) struct Keys(pub(super) String);

impl Keys {
    pub(super) fn epoch(&self) -> String {
        format!("{}epoch", self.0)
    }

    /// Prefix of all records.
    pub(super) fn instances(&self) -> String {
        format!("{}instances/", self.0)
    }

    pub(super) fn instance(&self, instance: &InstanceId) -> String {
        format!("{}instances/{instance}", self.0)
    }

    /// Prefix of the routers' verdicts on this incarnation.
    pub(super) fn verdicts(&self, party: &Party) -> String {
        format!("{}verdicts/{:016x}/{}/", self.0, party.incarnation.0, party.instance)
    }

    pub(super) fn verdict(&self, party: &Party, router: &str) -> String {
        format!("{}{router}", self.verdicts(party))
    }
}

/// The record, of any protocol version, or why it cannot be read: any client that may write to etcd may write anything.
pub(super) fn decode_record(instance: &[u8], value: &[u8]) -> Result<InstanceRecord, String> {
    let record = stored::decode_record(value).map_err(|e| e.to_string())?;
    if record.party.instance.as_str().as_bytes() != instance {
        return Err(format!("the record of {} stands under another name", record.party.instance));
    }
    Ok(record)
}

/// The record of a worker with a compatible protocol, or why it cannot be used.
pub(super) fn decode_usable(instance: &[u8], value: &[u8]) -> Result<InstanceRecord, String> {
    let record = decode_record(instance, value)?;
    is_usable(&record)?;
    Ok(record)
}

/// Why this process is not compatible with the worker of that record.
pub(super) fn is_usable(record: &InstanceRecord) -> Result<(), String> {
    let ours = ProtocolRange::CURRENT;
    match record.protocol.common(ours) {
        Some(_) => Ok(()),
        None => Err(format!("it speaks protocols {}, this process {ours}", record.protocol)),
    }
}
