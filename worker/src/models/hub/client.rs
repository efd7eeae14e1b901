//! Requests to the hub, and the meaning of its errors.

use super::api::Repository;
use super::{HubId, HubSettings};
use crate::models::ModelsError;
use std::time::Duration;
use ureq::config::RedirectAuthHeaders;
use ureq::http::{Response, StatusCode};
use ureq::{Agent, Body};

/// Longest wait for a connection, for an answer's head, and for each piece of a body. A whole download may take hours.
const CONNECT_MAX: Duration = Duration::from_secs(15);
const ANSWER_MAX: Duration = Duration::from_secs(60);
const PIECE_MAX: Duration = Duration::from_secs(60);
/// Longest description of a repository.
const DESCRIPTION_BYTES_MAX: u64 = 64 << 20;

/// A client of the hub.
pub(super) struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
}

impl Client {
    pub(super) fn new(settings: &HubSettings) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // The token is not sent to another host, such as a content network, after a redirect.
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_connect(Some(CONNECT_MAX))
            .timeout_recv_response(Some(ANSWER_MAX))
            .timeout_per_read(Some(PIECE_MAX))
            .build();
        Self { agent: config.new_agent(), endpoint: settings.endpoint.clone(), token: settings.token.clone() }
    }

    /// The repository's page, for messages.
    pub(super) fn page(&self, id: &HubId) -> String {
        format!("{}/{}", self.endpoint, id.repository())
    }

    /// URL of a file at a commit.
    pub(super) fn file_url(&self, id: &HubId, repository: &Repository, name: &str) -> String {
        format!("{}/resolve/{}/{name}", self.page(id), repository.commit())
    }

    /// Resolves the revision to a commit.
    pub(super) fn repository(&self, id: &HubId) -> Result<Repository, ModelsError> {
        let (page, revision) = (id.repository(), id.revision_segment());
        let url = format!("{}/api/models/{page}/revision/{revision}?blobs=true", self.endpoint);
        let network = |error: ureq::Error| ModelsError::Network { url: url.clone(), source: error.into() };
        let mut answer = self.get(&url, 0).map_err(network)?;
        if answer.status() != StatusCode::OK {
            return Err(self.refusal(id, &url, &answer));
        }
        let json = answer.body_mut().with_config().limit(DESCRIPTION_BYTES_MAX).read_to_string().map_err(network)?;
        let problem = || ModelsError::Hub { url: url.clone(), problem: "the answer is no model's description".into() };
        Repository::parse(&json).ok_or_else(problem)
    }

    /// A request for the bytes after the first `from`.
    pub(super) fn get(&self, url: &str, from: u64) -> Result<Response<Body>, ureq::Error> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if from > 0 {
            request = request.header("range", format!("bytes={from}-"));
        }
        request.call()
    }

    /// The meaning of a status other than success, and what to do.
    pub(super) fn refusal(&self, id: &HubId, url: &str, answer: &Response<Body>) -> ModelsError {
        let code = answer.headers().get("x-error-code").and_then(|code| code.to_str().ok());
        let status = answer.status();
        let (page, revision) = (self.page(id), id.revision());
        let problem = match (status.as_u16(), code) {
            (401, _) if self.token.is_none() => {
                format!("401: the model is private, gated or does not exist; check {page} and set HF_TOKEN (hub_token)")
            }
            (401 | 403, _) => format!("{status}: the token gives no access; accept the model's terms at {page}"),
            (404, Some("RevisionNotFound")) => format!("404: the model has no revision `{revision}`"),
            (404, Some("RepoNotFound")) => "404: there is no such model".to_owned(),
            (404, _) => format!("404: there is no such model, or it has no revision `{revision}`"),
            _ => format!("the hub answers {status}"),
        };
        ModelsError::Hub { url: url.to_owned(), problem }
    }
}
