//! Text bundles: fetched by digest from a worker, verified, loaded once and shared.

use super::ModelText;
use baton_node::grpc::Channel;
use baton_proto::v1::{self, worker_client::WorkerClient};
use baton_text::{TextError, bundle};
use baton_types::Digest;
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
    #[error("the worker does not give bundle {digest}: {status}")]
    Fetch {
        /// Asked for.
        digest: Digest,
        /// The answer.
        status: Box<tonic::Status>,
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
    /// The text with this digest, from the cache or from the worker behind `channel`.
    pub(crate) async fn get(&self, digest: Digest, channel: Channel) -> Result<Arc<ModelText>, BundleError> {
        if let Some(text) = self.0.lock().get(&digest) {
            return Ok(text.clone());
        }
        let bytes = tokio::time::timeout(FETCH_MAX, fetch(digest, channel))
            .await
            .map_err(|_| BundleError::Timeout(digest))??;
        let load = move || ModelText::load(&bundle::decode(&bytes)?);
        let text = tokio::task::spawn_blocking(load).await.unwrap_or_else(|e| Err(TextError::Broken(e.to_string())));
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

async fn fetch(digest: Digest, channel: Channel) -> Result<Vec<u8>, BundleError> {
    let status = |status| BundleError::Fetch { digest, status: Box::new(status) };
    let request = v1::BundleRequest { digest: digest.0.to_vec().into() };
    let mut chunks = WorkerClient::new(channel).bundle(request).await.map_err(status)?.into_inner();
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.message().await.map_err(status)? {
        bytes.extend_from_slice(&chunk.data);
        if bytes.len() > bundle::BYTES_MAX {
            return Err(BundleError::TooLarge(digest));
        }
    }
    let got = bundle::digest(&bytes);
    if got == digest { Ok(bytes) } else { Err(BundleError::Digest { asked: digest, got }) }
}
