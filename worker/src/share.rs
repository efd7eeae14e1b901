//! Cached prefixes between workers: one reads what another has, into its own cache, before it computes the rest.
//!
//! The name of what is read is the chain of its prefix names, 16 bytes each. They are keyed with the tenant's salt: who cannot name a
//! prefix cannot read it.

use baton_engine::{EngineHandle, SequenceRequest};
use baton_kv_cache::{HASH_TOKENS, Lease, PrefixHash, Reserve};
use baton_kv_transfer::{
    FetchRequest, HandoffFailure, KvTransfer, Peer, PinQuestion, PinReply, RefuseReason, TransferError,
};
use baton_types::GroupBlocks;
use std::time::{Duration, Instant};

/// Most tokens that are read at once, by the length of their name.
const TOKENS_MAX: usize = FetchRequest::NAME_BYTES_MAX / NAME_BYTES * HASH_TOKENS;
const NAME_BYTES: usize = 16;
/// A pull may take this many times what the measured rate says that computing the same takes; beyond that it is not worth it.
const PATIENCE: f64 = 2.0;
/// And at least so long, whatever was measured.
const TIME_MIN: Duration = Duration::from_millis(250);

/// What is to be read, and from whom.
#[derive(Clone, Debug)]
pub struct Pull {
    /// The worker that has it cached.
    pub owner: Peer,
    /// Tokens of the prompt that it has.
    pub tokens: usize,
    /// Tokens of its blocks.
    pub block_tokens: usize,
}

/// What was read. It stays cached while this value lives, and then as long as anything does.
#[derive(Debug)]
pub struct Pulled {
    /// Tokens of the prompt that are cached here now.
    pub tokens: usize,
    /// KV bytes that came.
    pub bytes: u64,
    _lease: Lease,
}

/// Why nothing was read. Nothing is lost: the prompt is computed.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// There is no room for it now.
    #[error("there is no room for {0} tokens now")]
    NoRoom(usize),
    /// It could not be asked for.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// The get failed.
    #[error(transparent)]
    Failed(#[from] HandoffFailure),
}

/// Reads what `pull` says and this worker lacks of a prompt into its cache. `None` where it lacks nothing of it, or shares nothing.
pub async fn pull(
    engine: &EngineHandle,
    transfer: &KvTransfer,
    request: &SequenceRequest,
    pull: &Pull,
) -> Result<Option<Pulled>, PullError> {
    let Some(prefix) = engine.prefix_of(request) else { return Ok(None) };
    let (pool, ours) = (engine.pool(), engine.config().block_tokens as usize);
    // Whole blocks of this side; the last token is computed here in any case.
    let tokens = pull.tokens.min(request.tokens.len() - 1).min(TOKENS_MAX) / ours * ours;
    let from = pool.cached_tokens(&prefix.names).min(tokens) / boundary(ours, pull.block_tokens);
    let from = from * boundary(ours, pull.block_tokens);
    if tokens <= from {
        return Ok(None);
    }
    let blocks = tokens / ours;
    let keep_free = engine.config().watermark_blocks as usize;
    let wanted = Reserve { names: &prefix.names, reuse_tokens_max: from, blocks, keep_free, now: Instant::now() };
    let room = (!engine.lacks_blocks()).then(|| pool.try_reserve(wanted)).flatten();
    // What it had may be gone since it looked.
    let lease = room.filter(|lease| lease.cached_blocks() * ours == from).ok_or(PullError::NoRoom(tokens))?;
    let deadline = request.deadline.min(Instant::now() + patience(tokens - from, engine.load().prefill_tokens_per_s));
    let fetch = FetchRequest {
        request_id: request.id.clone(),
        name: prefix.names[..tokens / HASH_TOKENS].iter().flat_map(|name| name.0).collect(),
        from: from as u32,
        tokens: tokens as u32,
        blocks: behind(&lease, from / ours),
        deadline,
        hold: Box::new(lease),
    };
    let fetched = transfer.fetch(&pull.owner, fetch)?.outcome().await?;
    let Ok(mut lease) = fetched.hold.downcast::<Lease>() else { return Ok(None) };
    lease.store(&prefix.names, tokens, prefix.keep, Instant::now());
    lease.let_go_of_spares();
    Ok(Some(Pulled { tokens, bytes: fetched.bytes, _lease: *lease }))
}

/// Lets a peer read what is cached here, or says that it is not.
pub fn pin(engine: &EngineHandle, question: &PinQuestion, reply: PinReply) {
    let (ours, tokens) = (engine.config().block_tokens as usize, question.tokens as usize);
    let (names, rest) = question.name.as_chunks::<NAME_BYTES>();
    if !rest.is_empty() || names.len() * HASH_TOKENS < tokens {
        return reply.refuse(RefuseReason::Protocol, "the name is no chain of prefixes as long as what is asked for");
    }
    let names: Vec<PrefixHash> = names.iter().map(|name| PrefixHash(*name)).collect();
    let blocks = tokens.div_ceil(ours);
    // Only a look at what is there: nothing is allocated for it.
    if engine.pool().cached_tokens(&names) < blocks * ours {
        return reply.refuse(RefuseReason::UnknownRequest, "that prefix is not cached here, or not all of it");
    }
    let reuse_tokens_max = blocks * ours;
    let wanted = Reserve { names: &names, reuse_tokens_max, blocks, keep_free: 0, now: Instant::now() };
    match engine.pool().try_reserve(wanted).filter(|lease| lease.cached_blocks() == blocks) {
        Some(lease) => reply.pin(behind(&lease, question.from as usize / ours), Box::new(lease)),
        None => reply.refuse(RefuseReason::UnknownRequest, "that prefix was evicted just now"),
    }
}

/// The blocks of a lease from this one on.
fn behind(lease: &Lease, first: usize) -> GroupBlocks {
    GroupBlocks(lease.blocks().0.iter().map(|group| group[first..].to_vec()).collect())
}

/// The smallest number of tokens that is whole blocks of both sides.
fn boundary(ours: usize, theirs: usize) -> usize {
    (1..=theirs.max(1)).map(|n| n * ours).find(|tokens| tokens.is_multiple_of(theirs.max(1))).unwrap_or(ours)
}

fn patience(tokens: usize, tokens_per_s: f32) -> Duration {
    let seconds = PATIENCE * tokens as f64 / f64::from(tokens_per_s);
    Duration::try_from_secs_f64(seconds).unwrap_or(TIME_MIN).max(TIME_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_blocks_of_both() {
        let cases = [(16, 16, 16), (16, 64, 64), (64, 16, 64), (48, 64, 192), (112, 128, 896), (16, 0, 16)];
        for (ours, theirs, expected) in cases {
            assert_eq!(boundary(ours, theirs), expected, "{ours}, {theirs}");
        }
    }

    #[test]
    fn it_is_given_up_when_computing_would_have_been_faster() {
        assert_eq!(patience(1000, 1000.0), Duration::from_secs(2));
        assert_eq!([patience(10, 1000.0), patience(10, 0.0)], [TIME_MIN; 2]);
    }
}
