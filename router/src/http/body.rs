//! Reads the body of a request within its size limit, its time limit and the memory budget.

use axum::body::Body;
use baton_node::intake::{Hold, IntakeFull};
use futures::StreamExt as _;
use std::time::{Duration, Instant};
use tokio::time::timeout_at;

#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyLimits {
    pub(crate) bytes_max: usize,
    /// From the head of the request to the last byte.
    pub(crate) time_max: Duration,
}

/// Why the body was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyError {
    TooLarge,
    Full(IntakeFull),
    /// The body took longer than [`BodyLimits::time_max`].
    Slow,
    /// The request's deadline passed before the body was complete.
    Deadline,
    Unreadable,
}

/// Reads the body of a request that arrived at `received`. Memory is held for the bytes received so far.
pub(super) async fn read(
    body: Body,
    limits: BodyLimits,
    received: Instant,
    deadline: Instant,
    hold: &mut Hold,
) -> Result<Vec<u8>, BodyError> {
    let slow = received + limits.time_max;
    let (until, late) = if slow < deadline { (slow, BodyError::Slow) } else { (deadline, BodyError::Deadline) };
    let whole = async {
        let (mut bytes, mut pieces) = (Vec::new(), body.into_data_stream());
        while let Some(piece) = pieces.next().await {
            let piece = piece.map_err(|_| BodyError::Unreadable)?;
            if piece.len() > limits.bytes_max - bytes.len() {
                return Err(BodyError::TooLarge);
            }
            hold.grow(piece.len() as u64).map_err(BodyError::Full)?;
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes)
    };
    timeout_at(until.into(), whole).await.unwrap_or(Err(late))
}
