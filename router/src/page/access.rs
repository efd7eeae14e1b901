//! Who may see the cluster: operators, as with `baton status`.

use super::Page;
use crate::auth::{Caller, Denied};
use crate::http::access::{is_nobodys, origin_authority};
use crate::http::error::Shape;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::Response;

/// Adds the client to the request, and removes the key: no code behind this sees it.
pub(super) async fn admit(State(page): State<Page>, mut request: Request, next: Next) -> Response {
    match may_read(&page, request.headers(), request.uri()) {
        Ok(caller) => {
            request.headers_mut().remove(header::AUTHORIZATION);
            let client = caller.client(request.extensions());
            request.extensions_mut().insert(client);
            next.run(request).await
        }
        Err(refused) => answer(&refused),
    }
}

/// Why a call may not read.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(transparent)]
    Denied(#[from] Denied),
    /// A page of another origin could not read the answer, but could use up the streams.
    #[error("a page of another origin may not ask this")]
    OtherOrigin,
    /// Without keys, a name that leads here could be another's: its pages would have this origin.
    #[error(
        "without API keys the cluster is shown at an IP address or at a name without dots: open the page there, or set auth.keys_file"
    )]
    OtherName,
}

fn may_read(page: &Page, headers: &HeaderMap, uri: &Uri) -> Result<Caller, Refused> {
    // Browsers leave out the first where the page was not had in a secure way.
    let is_other = headers.get("sec-fetch-site").is_some_and(|site| site != "same-origin" && site != "none");
    if is_other || headers.get(header::ORIGIN).is_some_and(|origin| !is_of(origin, headers, uri)) {
        return Err(Refused::OtherOrigin);
    }
    let caller = page.access.reader(headers, page.open)?;
    if caller.key.is_none() && !is_own_name(headers, uri) {
        return Err(Refused::OtherName);
    }
    Ok(caller)
}

/// Whether a page of this origin calls where it is from.
fn is_of(origin: &HeaderValue, headers: &HeaderMap, uri: &Uri) -> bool {
    let page = origin.to_str().ok().and_then(origin_authority);
    page.is_some() && page == authority(headers, uri)
}

/// The name and port by which a call came.
fn authority<'a>(headers: &'a HeaderMap, uri: &'a Uri) -> Option<&'a str> {
    let named = || headers.get(header::HOST).and_then(|host| host.to_str().ok());
    uri.authority().map(|of| of.as_str()).or_else(named)
}

/// Whether nobody can own the name by which this call came: it is an address, or has no dot.
fn is_own_name(headers: &HeaderMap, uri: &Uri) -> bool {
    authority(headers, uri).is_none_or(is_nobodys)
}

fn answer(refused: &Refused) -> Response {
    let (status, code) = match refused {
        Refused::Denied(Denied::NoKey | Denied::UnknownKey) => (StatusCode::UNAUTHORIZED, "invalid_api_key"),
        Refused::Denied(Denied::NotOperator) => (StatusCode::FORBIDDEN, "not_operator"),
        Refused::Denied(Denied::NoOperators) => (StatusCode::FORBIDDEN, "no_operators"),
        Refused::OtherOrigin => (StatusCode::FORBIDDEN, "other_origin"),
        Refused::OtherName => (StatusCode::FORBIDDEN, "other_name"),
    };
    // What is said to those who would operate the cluster does not help those who only look at it.
    let message = match refused {
        Refused::Denied(Denied::NoKey) => {
            "the cluster is shown to operators: send a key that the keys file marks `operator`, in the header \
             `authorization: Bearer KEY`"
                .to_owned()
        }
        Refused::Denied(Denied::NotOperator) => {
            "this API key may not see the cluster: it takes one that the keys file marks `operator`".to_owned()
        }
        Refused::Denied(Denied::NoOperators) => {
            "this router has an identity and no keys, so no key makes anybody an operator: set auth.keys_file, or \
             page.open to show the cluster to everyone who reaches this port. `baton status` works with an operator's \
             certificate"
                .to_owned()
        }
        other => other.to_string(),
    };
    let mut response = Shape::OpenAi.plain(status, &message, code);
    if status == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_someone_may_own_is_not_ours() {
        let is_own = |host: &str| {
            let headers = HeaderMap::from_iter([(header::HOST, HeaderValue::from_str(host).unwrap())]);
            is_own_name(&headers, &Uri::from_static("/cluster"))
        };
        for own in ["127.0.0.1:8000", "[::1]:8000", "[::1]", "localhost", "localhost:8000", "router:80", "10.0.0.7"] {
            assert!(is_own(own), "{own}");
        }
        for other in ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example:80"] {
            assert!(!is_own(other), "{other}");
        }
        // Over HTTP/2 the name is in the target.
        let target = Uri::from_static("http://evil.example/cluster");
        assert!(!is_own_name(&HeaderMap::new(), &target));
    }
}
