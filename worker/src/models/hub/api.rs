//! The hub's description of a repository: `GET /api/models/{id}/revision/{revision}?blobs=true`.

use super::id::is_commit;
use serde::Deserialize;

/// A repository at one commit.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Repository {
    sha: String,
    #[serde(default)]
    siblings: Vec<RemoteFile>,
}

/// A file of the repository.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct RemoteFile {
    #[serde(rename = "rfilename")]
    pub(super) name: String,
    /// Absent on mirrors that do not support `blobs`.
    pub(super) size: Option<u64>,
    pub(super) lfs: Option<Lfs>,
}

/// Content of a large file.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Lfs {
    pub(super) sha256: String,
}

impl Repository {
    /// Parses an answer; the commit is checked, since it becomes part of a path.
    pub(super) fn parse(json: &str) -> Option<Self> {
        serde_json::from_str::<Self>(json).ok().filter(|repository| is_commit(&repository.sha))
    }

    pub(super) fn commit(&self) -> &str {
        &self.sha
    }

    pub(super) fn file(&self, name: &str) -> Option<&RemoteFile> {
        self.siblings.iter().find(|file| file.name == name)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.siblings.iter().map(|file| file.name.as_str())
    }
}
