//! Text bundles: fetched by digest from a worker, verified, loaded once and shared.

use super::ModelText;
use crate::port::{CallError, Link};
use baton_node::runtime::blocking;
use baton_text::{TextError, bundle};
use baton_types::{Digest, RequestError, Runtime};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Longest wait for a whole bundle: tens of megabytes on a slow link.
const FETCH_MAX: Duration = Duration::from_secs(60);
/// Bundles kept although no worker needs them now: a restarted worker finds its text loaded.
const IDLE_MAX: usize = 8;

/// Why a bundle is not there.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BundleError {
    /// The worker did not give it.
    #[error("the worker does not give bundle {digest}: {error}")]
    Fetch {
        /// Asked for.
        digest: Digest,
        /// The answer.
        error: RequestError,
    },
    /// It took too long.
    #[error("bundle {0} was not complete after {FETCH_MAX:?}")]
    Timeout(Digest),
    /// Too large to be a bundle.
    #[error("bundle {0} is over the limit of {max} bytes", max = bundle::BYTES_MAX)]
    TooLarge(Digest),
    /// Its bytes are not what was asked for.
    #[error("bundle {asked} came with digest {got}: the worker's copy is damaged")]
    Digest {
        /// Asked for.
        asked: Digest,
        /// Of the bytes that came.
        got: Digest,
    },
    /// Its content cannot be served.
    #[error("bundle {digest}: {source}")]
    Content {
        /// Which.
        digest: Digest,
        /// Why.
        source: TextError,
    },
}

/// Loaded bundles by digest.
#[derive(Debug, Default)]
pub(crate) struct TextCache(Mutex<HashMap<Digest, Arc<ModelText>>>);

impl TextCache {
    /// The text with this digest, from the cache or from the worker behind `link`.
    pub(crate) async fn get(
        &self,
        digest: Digest,
        link: &dyn Link,
        runtime: &dyn Runtime,
    ) -> Result<Arc<ModelText>, BundleError> {
        if let Some(text) = self.0.lock().get(&digest) {
            return Ok(text.clone());
        }
        let bytes = runtime.until(runtime.now() + FETCH_MAX, fetch(digest, link)).await;
        let bytes = bytes.ok_or(BundleError::Timeout(digest))??;
        let load = move || ModelText::load(&bundle::decode(&bytes)?);
        let text =
            blocking(runtime, load).await.unwrap_or_else(|| Err(TextError::Broken("it cannot be loaded".into())));
        let text = Arc::new(text.map_err(|source| BundleError::Content { digest, source })?);
        let mut cache = self.0.lock();
        let mut idle = 0;
        cache.retain(|_, text| {
            idle += usize::from(Arc::strong_count(text) == 1);
            Arc::strong_count(text) > 1 || idle <= IDLE_MAX
        });
        Ok(cache.entry(digest).or_insert(text).clone())
    }
}

async fn fetch(digest: Digest, link: &dyn Link) -> Result<Vec<u8>, BundleError> {
    let bytes = match link.bundle(digest, bundle::BYTES_MAX).await {
        Ok(bytes) => bytes,
        Err(CallError::Refused(error) | CallError::Lost(error)) => return Err(BundleError::Fetch { digest, error }),
    };
    if bytes.len() > bundle::BYTES_MAX {
        return Err(BundleError::TooLarge(digest));
    }
    let got = bundle::digest(&bytes);
    if got == digest { Ok(bytes) } else { Err(BundleError::Digest { asked: digest, got }) }
}
