//! A router's record cache on disk: the last known records, and their position in etcd's history.

use super::keys::is_usable;
use super::view::Position;
use crate::membership::{Member, Registration};
use crate::private;
use baton_proto::convert::stored::{self, CachedView};
use baton_types::InstanceRecord;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Largest file that is read: about ten thousand records.
const BYTES_MAX: u64 = 64 << 20;
const NAME: &str = "members";

/// Records, and the position at which they were read.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct CachedRecords {
    pub(super) position: Position,
    pub(super) members: Vec<Member>,
}

/// A folder that holds the cache of one prefix.
#[derive(Clone, Debug)]
pub(super) struct RecordCache {
    folder: PathBuf,
    prefix: String,
}

impl RecordCache {
    pub(super) fn new(folder: &Path, prefix: &str) -> Self {
        Self { folder: folder.into(), prefix: prefix.into() }
    }

    /// Replaces the cache with `remembered` atomically: a concurrent reader gets the old or the new one. Only this user
    /// may read it.
    pub(super) fn write(&self, remembered: &CachedRecords) -> io::Result<()> {
        private::make_folder(&self.folder)?;
        let Position { cluster, epoch, revision } = remembered.position;
        let member = |member: &Member| (InstanceRecord::clone(&member.record), member.registration.revision);
        let members = remembered.members.iter().map(member).collect();
        let view = CachedView { prefix: self.prefix.clone(), cluster, epoch, revision, members };
        private::replace_file(&self.folder.join(NAME), &stored::encode_view(view))
    }

    /// The cached records; `None` if there are none of this prefix. Records that cannot be used are left out.
    pub(super) fn read(&self, members_max: usize) -> io::Result<Option<CachedRecords>> {
        let file = match File::open(self.folder.join(NAME)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut bytes = Vec::new();
        file.take(BYTES_MAX).read_to_end(&mut bytes)?;
        let view = stored::decode_view(&bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        if view.prefix != self.prefix {
            return Ok(None);
        }
        let position = Position { cluster: view.cluster, epoch: view.epoch, revision: view.revision };
        let members = view.members.into_iter().filter_map(|(record, revision)| member(record, revision));
        let members = members.take(members_max).collect();
        Ok(Some(CachedRecords { position, members }))
    }
}

/// The member of a record that did not come from etcd; `None` if this process is not compatible with it.
pub(super) fn member(record: InstanceRecord, revision: u64) -> Option<Member> {
    is_usable(&record).ok()?;
    let registration = Registration { incarnation: record.party.incarnation, revision };
    Some(Member { record: Arc::new(record), registration })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership::conformance::record;
    use baton_types::ProtocolRange;
    use std::os::unix::fs::PermissionsExt as _;

    fn remembered(records: &[InstanceRecord]) -> CachedRecords {
        let member = |record: &InstanceRecord| {
            let registration = Registration { incarnation: record.party.incarnation, revision: 7 };
            Member { record: Arc::new(record.clone()), registration }
        };
        let position = Position { cluster: 1, epoch: 2, revision: 30 };
        CachedRecords { position, members: records.iter().map(member).collect() }
    }

    #[test]
    fn what_is_written_is_read_by_its_owner() {
        let folder = tempfile::tempdir().unwrap();
        let cache = RecordCache::new(&folder.path().join("cache"), "/a/");
        assert_eq!(cache.read(9).unwrap(), None);
        let foreign = InstanceRecord { protocol: ProtocolRange { min: 98, max: 99 }, ..record("d-2", 3) };
        let records = [record("d-0", 1), record("d-1", 2), foreign];
        cache.write(&remembered(&records)).unwrap();
        assert_eq!(cache.read(9).unwrap(), Some(remembered(&records[..2])), "one speaks no protocol of ours");
        assert_eq!(cache.read(1).unwrap(), Some(remembered(&records[..1])));
        assert_eq!(RecordCache::new(&folder.path().join("cache"), "/b/").read(9).unwrap(), None, "another cluster's");
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let folder = folder.path().join("cache");
        assert_eq!((mode(&folder), mode(&folder.join(NAME))), (0o700, 0o600));
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "nothing is left beside it");
        std::fs::write(folder.join(NAME), b"\xff\xff torn").unwrap();
        assert_eq!(cache.read(9).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
