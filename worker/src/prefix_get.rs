//! Gets of cached prefixes: a worker gets what another worker has cached into its own cache, before it computes the rest.
//!
//! The name of a get is the chain of block hashes, 16 bytes each. The hashes are keyed with the tenant's salt: a peer that cannot compute
//! the name of a prefix cannot get it.
//!
//! Of a group of states, the owner gives the state at the end of the prefix, and the reader takes no other. So a prefix is served only where a
//! checkpoint is cached at its very end.

use crate::hold::LeaseHold;
use baton_engine::{EngineHandle, SequenceRequest};
use baton_kv_cache::{Fill, HASH_TOKENS, Lease, PrefixHash, Reserve, SharedPool};
use baton_kv_transfer::{
    GetRequest, HandoffFailure, KvTransfer, Peer, PinQuestion, PinReply, RefuseReason, TransferError,
};
use baton_node::membership::Members;
use baton_types::{BlockTable, BlockTables, KvLayout};
use std::time::Duration;

/// Most tokens of one get, limited by the length of its name.
const TOKENS_MAX: usize = GetRequest::NAME_BYTES_MAX / HASH_BYTES * HASH_TOKENS;
const HASH_BYTES: usize = 16;
/// A get may take this many times as long as computing the same tokens takes at the measured rate; beyond that it is not worthwhile.
const PATIENCE: f64 = 2.0;
/// Shortest time limit of a get, at any measured rate.
const TIME_MIN: Duration = Duration::from_millis(250);

/// Which prefix to get, and from which worker.
#[derive(Clone, Debug)]
pub struct PrefixGet {
    owner: Peer,
    tokens: usize,
    block_tokens: usize,
    time_min: Duration,
}

/// A block size that no layout has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no worker has blocks of {0} tokens: a multiple of 16 between 16 and 128")]
pub struct BlockTokens(u32);

impl PrefixGet {
    /// A get of this many tokens of the prompt, which `owner` has cached in blocks of `block_tokens`.
    ///
    /// # Errors
    /// If no layout has such blocks.
    pub fn try_new(owner: Peer, tokens: u32, block_tokens: u32) -> Result<Self, BlockTokens> {
        let sizes = KvLayout::GRANULE_TOKENS..=KvLayout::BLOCK_TOKENS_MAX;
        if !sizes.contains(&block_tokens) || !block_tokens.is_multiple_of(KvLayout::GRANULE_TOKENS) {
            return Err(BlockTokens(block_tokens));
        }
        Ok(Self { owner, tokens: tokens as usize, block_tokens: block_tokens as usize, time_min: TIME_MIN })
    }

    /// The same get with this time limit, at any measured rate.
    #[must_use]
    pub fn patient(self, time_min: Duration) -> Self {
        Self { time_min, ..self }
    }

    pub fn owner(&self) -> &Peer {
        &self.owner
    }
}

/// The result of a get. It stays cached while this value lives, and afterwards like any other cached prefix.
#[derive(Debug)]
pub struct CachedPrefix {
    /// Tokens of the prompt that are cached here now.
    pub tokens: usize,
    /// KV bytes received for it.
    pub bytes: u64,
    _lease: Lease,
}

/// Why a get failed. Nothing is lost: the prompt is computed.
#[derive(Debug, thiserror::Error)]
pub enum PrefixGetError {
    /// There is no room for it now.
    #[error("there is no room for {0} tokens now")]
    NoRoom(usize),
    /// It could not be requested.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// It began, and failed.
    #[error(transparent)]
    Failed(#[from] HandoffFailure),
}

/// Gets the part of a prompt that `get` names and this worker lacks into its cache. `None` if it lacks nothing of it, or if the prompt is
/// not shared.
pub async fn get_prefix(
    engine: &EngineHandle,
    transfer: &KvTransfer,
    request: &SequenceRequest,
    get: &PrefixGet,
) -> Result<Option<CachedPrefix>, PrefixGetError> {
    let Some(keep) = engine.keep(request) else { return Ok(None) };
    let hashes = request.block_hashes();
    let (pool, ours) = (engine.pool(), engine.block_tokens());
    // Whole blocks of this worker; the last token is always computed here.
    let tokens_max = (request.tokens.len() - 1).min(hashes.len() * HASH_TOKENS).min(TOKENS_MAX);
    let tokens = get.tokens.min(tokens_max) / ours * ours;
    if pool.cached_tokens(&hashes) >= tokens {
        return Ok(None);
    }
    let boundary = boundary(ours, get.block_tokens);
    let keep_free = vec![engine.config().watermark_blocks as usize; pool.groups()];
    let wanted = Reserve {
        hashes: &hashes,
        // Something moves, even where all but a state is here.
        reuse_tokens_max: tokens - 1,
        tokens,
        fill: Fill::Received { peer_block_tokens: Some(get.block_tokens) },
        keep_free: &keep_free,
        now: engine.now(),
    };
    let room = (!engine.lacks_blocks()).then(|| reserve_behind(&pool, wanted, boundary)).flatten();
    let (lease, from) = room.ok_or(PrefixGetError::NoRoom(tokens))?;
    let patience = patience(tokens - from, engine.load().prefill_tokens_per_s).max(get.time_min);
    let deadline = request.deadline.min(engine.now() + patience);
    let wanted = GetRequest {
        request_id: request.id.clone(),
        name: hashes[..tokens / HASH_TOKENS].iter().flat_map(|hash| hash.0).collect(),
        from: from as u32,
        tokens: tokens as u32,
        blocks: behind(&lease, from / ours),
        deadline,
        hold: Box::new(LeaseHold::new(lease, &get.owner.party, ours)),
    };
    let got = transfer.get(&get.owner, wanted)?.outcome().await?;
    let Some(mut lease) = LeaseHold::into_lease(got.hold) else { return Ok(None) };
    lease.store(&hashes, tokens, keep, engine.now());
    lease.let_go_of_spares();
    Ok(Some(CachedPrefix { tokens, bytes: got.bytes, _lease: lease }))
}

/// Lets a peer read a prefix that is cached here, or refuses. Only registered workers may: the hashes of prefixes are no secret to them.
pub fn pin_prefix(engine: &EngineHandle, members: &Members, question: &PinQuestion, reply: PinReply) {
    if !members.contains(&question.reader) {
        let detail = format!("{} is no worker that is registered here, or not as this start", question.reader);
        return reply.refuse(RefuseReason::UnknownRequest, detail);
    }
    let (ours, tokens) = (engine.block_tokens(), question.tokens as usize);
    let (hashes, rest) = question.name.as_chunks::<HASH_BYTES>();
    if !rest.is_empty() || hashes.len() * HASH_TOKENS < tokens {
        return reply.refuse(RefuseReason::Protocol, "the name is no chain of prefixes as long as what is asked for");
    }
    // What is asked for, and nothing after it: a longer prefix may be cached where this one is not.
    let hashes: Vec<PrefixHash> = hashes[..tokens / HASH_TOKENS].iter().map(|hash| PrefixHash(*hash)).collect();
    let blocks = tokens.div_ceil(ours);
    // Only looks up what is cached: allocates nothing.
    if engine.pool().cached_tokens(&hashes) < blocks * ours {
        return reply.refuse(RefuseReason::UnknownRequest, "that prefix is not cached here, or not all of it");
    }
    let reuse_tokens_max = blocks * ours;
    let wanted = Reserve {
        hashes: &hashes,
        reuse_tokens_max,
        tokens,
        fill: Fill::Received { peer_block_tokens: None },
        keep_free: &[],
        now: engine.now(),
    };
    match reserve_exactly(&engine.pool(), wanted, blocks) {
        Some(lease) => reply.pin(behind(&lease, question.from as usize / ours), Box::new(lease)),
        None => reply.refuse(RefuseReason::UnknownRequest, "that prefix was evicted just now"),
    }
}

/// A lease with exactly as many cached blocks as the lookup found. The cache may change in between. If blocks were evicted, the peer
/// would read blocks that were never written; if blocks were added, blocks that others share would be written.
fn reserve_exactly(pool: &SharedPool, wanted: Reserve<'_>, cached_blocks: usize) -> Option<Lease> {
    pool.try_reserve(wanted).filter(|lease| lease.cached_blocks() == cached_blocks)
}

/// A lease whose cached blocks end at a multiple of `boundary` tokens, and that end: what is cached behind it is received again.
fn reserve_behind(pool: &SharedPool, wanted: Reserve<'_>, boundary: usize) -> Option<(Lease, usize)> {
    let mut reuse_tokens_max = wanted.reuse_tokens_max / boundary * boundary;
    loop {
        let lease = pool.try_reserve(Reserve { reuse_tokens_max, ..wanted })?;
        let cached = lease.cached_blocks() * pool.shape().block_tokens;
        if cached.is_multiple_of(boundary) {
            return Some((lease, cached));
        }
        reuse_tokens_max = cached / boundary * boundary;
    }
}

/// The blocks of a lease from index `first` on, which count from there. The state at its end is one of them: `first` is before the last block.
fn behind(lease: &Lease, first: usize) -> BlockTables {
    let tables = lease.tables().0.iter().map(|table| {
        let left_out = first.saturating_sub(table.first).min(table.blocks.len());
        BlockTable { first: table.first.saturating_sub(first), blocks: table.blocks[left_out..].to_vec() }
    });
    BlockTables(tables.collect())
}

/// The smallest number of tokens that is whole blocks on both sides: the least common multiple.
fn boundary(ours: usize, theirs: usize) -> usize {
    let (mut a, mut b) = (ours, theirs);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    ours / a * theirs
}

fn patience(tokens: usize, tokens_per_s: f32) -> Duration {
    let seconds = PATIENCE * tokens as f64 / f64::from(tokens_per_s);
    Duration::try_from_secs_f64(seconds).unwrap_or(TIME_MIN).max(TIME_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_kv_cache::{CacheConfig, Keep, PoolGroup, PoolShape};
    use baton_kv_transfer::TransferAddress;
    use baton_types::{GroupKind, Incarnation, InstanceId, Party};
    use std::time::Instant;

    #[test]
    fn whole_blocks_of_both() {
        let cases = [(16, 16, 16), (16, 64, 64), (64, 16, 64), (48, 64, 192), (112, 128, 896), (128, 128, 128)];
        for (ours, theirs, expected) in cases {
            assert_eq!(boundary(ours, theirs), expected, "{ours}, {theirs}");
        }
    }

    #[test]
    fn blocks_that_no_layout_has_are_refused_at_once() {
        let party = Party { instance: InstanceId::try_new("d").unwrap(), incarnation: Incarnation(1) };
        let address = TransferAddress::from_bytes(b"t127.0.0.1:9").unwrap();
        let get = |block_tokens| {
            PrefixGet::try_new(Peer { party: party.clone(), address: address.clone(), shard: 0 }, 64, block_tokens)
        };
        for block_tokens in [0, 1, 15, 24, 129, 144, 4_294_967_291, u32::MAX] {
            assert_eq!(get(block_tokens).unwrap_err(), BlockTokens(block_tokens));
        }
        let begin = Instant::now();
        for theirs in (16..=128).step_by(16) {
            assert_eq!(get(theirs).unwrap().block_tokens, theirs as usize);
            // For any size: computed, not searched.
            assert!(boundary(16 * theirs as usize, (1 << 40) + 1) > 1 << 40);
        }
        assert!(begin.elapsed() < Duration::from_secs(10));
    }

    /// A pool with the hashes of three blocks of 16 tokens, this many of which are cached.
    fn pool_with(cached: usize) -> (SharedPool, Vec<PrefixHash>) {
        let cache = CacheConfig { pinned_max: 0, pinned_of_one_max: 0, changes_max: 8 };
        let pool = SharedPool::with_cache(PoolShape::full(1, 8, 16), cache).unwrap();
        let hashes: Vec<PrefixHash> = (1..=3).map(|n| PrefixHash([n; 16])).collect();
        let wanted = Reserve {
            hashes: &hashes,
            reuse_tokens_max: 0,
            tokens: 48,
            fill: Fill::Received { peer_block_tokens: None },
            keep_free: &[],
            now: Instant::now(),
        };
        let mut lease = pool.try_reserve(wanted).unwrap();
        lease.store(&hashes, cached * 16, Keep::idle(Duration::from_secs(60)), Instant::now());
        drop(lease);
        assert_eq!(pool.cached_tokens(&hashes), cached * 16);
        (pool, hashes)
    }

    #[test]
    fn what_was_evicted_since_it_was_looked_is_not_pinned() {
        for (cached, looked) in [(3, 3), (2, 3), (0, 3), (3, 2)] {
            let (pool, hashes) = pool_with(cached);
            let reuse_tokens_max = 48;
            let wanted = Reserve {
                hashes: &hashes,
                reuse_tokens_max,
                tokens: 48,
                fill: Fill::Received { peer_block_tokens: None },
                keep_free: &[],
                now: Instant::now(),
            };
            let lease = reserve_exactly(&pool, wanted, looked);
            assert_eq!(lease.is_some(), cached == looked, "{cached} blocks are cached, {looked} were when it looked");
            drop(lease);
            assert_eq!(pool.counts().referenced, 0, "nothing stays reserved");
        }
    }

    /// Wants so many tokens of a prefix, of which so many may come from the cache.
    fn of(hashes: &[PrefixHash], reuse_tokens_max: usize, tokens: usize) -> Reserve<'_> {
        let fill = Fill::Received { peer_block_tokens: None };
        Reserve { hashes, reuse_tokens_max, tokens, fill, keep_free: &[], now: Instant::now() }
    }

    /// A pool with a full group and one of states, in blocks of 16 tokens.
    fn pool_of_states() -> (SharedPool, Vec<PrefixHash>) {
        let cache = CacheConfig { pinned_max: 0, pinned_of_one_max: 0, changes_max: 8 };
        let groups = [(GroupKind::Full, 16), (GroupKind::State, 8)].map(|(kind, blocks)| PoolGroup { kind, blocks });
        let pool = SharedPool::with_cache(PoolShape { block_tokens: 16, groups: groups.to_vec() }, cache).unwrap();
        (pool, (1..=8).map(|n| PrefixHash([n; 16])).collect())
    }

    /// Gets so many tokens, all but those before a multiple of `boundary` that are cached. Returns the first that is got.
    fn got(pool: &SharedPool, hashes: &[PrefixHash], tokens: usize, boundary: usize) -> usize {
        let (mut lease, from) = reserve_behind(pool, of(hashes, tokens - 1, tokens), boundary).unwrap();
        let [rows, state] = &behind(&lease, from / 16).0[..] else { panic!("two groups") };
        assert_eq!((rows.first, rows.end()), (0, (tokens - from) / 16));
        assert_eq!((state.first, state.blocks.len()), ((tokens - from) / 16 - 1, 1), "the state behind the last block");
        lease.store(hashes, tokens, Keep::idle(Duration::from_secs(60)), Instant::now());
        lease.let_go_of_spares();
        from
    }

    #[test]
    fn a_get_brings_the_state_at_its_end_and_what_lacks_before_it() {
        let (pool, hashes) = pool_of_states();
        assert_eq!((got(&pool, &hashes, 48, 16), pool.cached_tokens(&hashes)), (0, 48));
        // Behind what is cached, with its state or without.
        assert_eq!((got(&pool, &hashes, 80, 16), pool.cached_tokens(&hashes)), (48, 80));
        assert_eq!((got(&pool, &hashes, 96, 32), pool.cached_tokens(&hashes)), (64, 96));
        // Only a state lacks: one block comes along.
        assert_eq!(pool.cached_tokens(&hashes[..4]), 48);
        assert_eq!((got(&pool, &hashes[..4], 64, 16), pool.cached_tokens(&hashes[..4])), (48, 64));
        assert_eq!(pool.counts().referenced, 0);
    }

    #[test]
    fn a_prefix_is_pinned_only_where_its_state_is_cached() {
        let (pool, hashes) = pool_of_states();
        got(&pool, &hashes, 48, 16);
        got(&pool, &hashes, 80, 16);
        for blocks in 1..=6 {
            let tokens = blocks * 16;
            let lease = reserve_exactly(&pool, of(&hashes[..blocks], tokens, tokens), blocks);
            assert_eq!(lease.is_some(), [3, 5].contains(&blocks), "{tokens} tokens");
            for first in lease.iter().flat_map(|_| 0..blocks) {
                let tables = behind(lease.as_ref().unwrap(), first);
                assert_eq!((tables.0[0].first, tables.0[0].end()), (0, blocks - first));
                assert_eq!(
                    (tables.0[1].first, tables.0[1].blocks.len()),
                    (blocks - first - 1, 1),
                    "from block {first} on"
                );
            }
            let cached = pool.cached_blocks(&hashes[..blocks]);
            let state = lease.map(|lease| lease.tables().0[1].blocks[0]);
            assert!(state.is_none() || cached.0[1].blocks == [state.unwrap()], "the cached checkpoint itself");
        }
        assert_eq!(pool.counts().referenced, 0, "nothing stays pinned");
    }

    #[test]
    fn it_is_given_up_when_computing_would_have_been_faster() {
        assert_eq!(patience(1000, 1000.0), Duration::from_secs(2));
        assert_eq!([patience(10, 1000.0), patience(10, 0.0)], [TIME_MIN; 2]);
    }
}
