//! `org/name[@revision]`

/// A repository and a revision of it. The parts hold only letters, digits, `-`, `_`, `.` (a revision also `/`), so that
/// they are safe in URLs and paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubId {
    organization: String,
    name: String,
    revision: String,
}

impl HubId {
    /// Branch used for an id without a revision.
    const REVISION_DEFAULT: &str = "main";

    pub(in crate::models) fn parse(text: &str) -> Option<Self> {
        let (repository, revision) = text.split_once('@').unwrap_or((text, Self::REVISION_DEFAULT));
        let (organization, name) = repository.split_once('/')?;
        let good = is_name(organization) && is_name(name) && revision.split('/').all(is_name);
        let [organization, name, revision] = [organization, name, revision].map(str::to_owned);
        good.then_some(Self { organization, name, revision })
    }

    /// The repository as `org/name`.
    pub fn repository(&self) -> String {
        format!("{}/{}", self.organization, self.name)
    }

    /// A branch, a tag or a commit.
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// Whether the revision is a commit, which never changes.
    pub(super) fn is_commit(&self) -> bool {
        is_commit(&self.revision)
    }

    /// A unique folder name.
    pub(super) fn folder(&self) -> String {
        format!("{}--{}", self.organization, self.name)
    }

    /// The revision as one path segment of a URL.
    pub(super) fn revision_segment(&self) -> String {
        self.revision.replace('/', "%2F")
    }
}

/// Whether this is the full hash of a commit: 40 hexadecimal digits.
pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| b.is_ascii_hexdigit())
}

fn is_name(text: &str) -> bool {
    let allowed = text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    !text.is_empty() && !text.starts_with('.') && allowed
}
