//! Which rows of a pool a checksum covers, and the sums of a layer.
//!
//! One sum covers 16 tokens of one plane of one layer, over the valid bytes only, or one plane of a layer's state, whole, however large
//! ([`baton_memory::checksum`]). The memory computes it, where
//! it is. On a device that is full, its operations take turns with those of the transport ([`crate::pool_turns`]).

use crate::HandoffFailure;
use crate::heads::Heads;
use crate::plan::locate;
use crate::pool_turns::{OPERATION_MAX, PLACE_MAX, Turns, User};
pub(crate) use baton_memory::checksum::ALGORITHM;
use baton_memory::{MemoryError, Pending, PoolMemory, Rows};
use baton_types::{BlockTable, KvLayout, KvPoolMap, RequestId};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Tokens that one sum covers.
pub(crate) const GRANULE: u32 = KvLayout::GRANULE_TOKENS;
/// Most sums of one operation: a device does not compute longer without a chance for others, and a list of rows stays small.
const SUMS_MAX: usize = 4096;
/// Pause before another attempt at an operation for which a device had no room.
const BUSY_PAUSE: Duration = Duration::from_micros(100);

/// Why there are no sums. Nothing was compared, so none of these is a sign of corruption.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SumError {
    /// Others fill the device, or nobody wants the sums any more.
    #[error("it had no room for checksums for {} s", PLACE_MAX.as_secs())]
    Busy,
    #[error("it does not end a checksum within {} s", OPERATION_MAX.as_secs())]
    Late,
    #[error("{0}")]
    Failed(MemoryError),
}

impl SumError {
    /// Logs it for the request whose KV was to be summed.
    pub(crate) fn log(&self, request_id: &RequestId) {
        match self {
            Self::Busy => tracing::warn!(%request_id, "the pool's device is busy: {self}"),
            Self::Late | Self::Failed(_) => {
                tracing::error!(%request_id, "the pool's device cannot compute checksums: {self}")
            }
        }
    }
}

impl From<SumError> for HandoffFailure {
    fn from(error: SumError) -> Self {
        match error {
            SumError::Busy => Self::DeviceBusy(error.to_string()),
            SumError::Late | SumError::Failed(_) => Self::Device(error.to_string()),
        }
    }
}

/// Where the bytes of each sum of [`layer_sums`] lie.
fn layer_rows(
    map: &KvPoolMap,
    blocks: &BlockTable,
    heads: &Heads,
    group: usize,
    layer: usize,
    tokens: Range<u32>,
) -> Vec<Rows> {
    debug_assert_eq!(tokens.start % GRANULE, 0);
    let shape = &map.layout().groups()[group];
    let mut rows = Vec::with_capacity((tokens.len() / GRANULE as usize + 1) * shape.planes.len());
    for first in tokens.clone().step_by(GRANULE as usize) {
        let (block, row) = locate(map, blocks, group, first);
        let positions = first..tokens.end.min(first + GRANULE);
        let within = row..row + shape.rows(positions.len()) as u32;
        for (plane, shape) in shape.planes.iter().enumerate() {
            let heads = &heads[group][plane];
            let range = map.token_range(group, layer, block, plane, within.clone());
            rows.push(Rows {
                start: range.start + heads.start as usize * shape.head_stride(),
                row_bytes: heads.len() * shape.head_stride(),
                stride: shape.token_stride(),
                rows: within.len(),
            });
        }
    }
    rows
}

/// Has sums computed by a device.
pub(crate) struct Summer<'a> {
    pub(crate) memory: &'a dyn PoolMemory,
    pub(crate) turns: &'a Turns,
    /// Whether nobody wants the sums any more. Then they wait no longer for a place.
    pub(crate) is_over: &'a dyn Fn() -> bool,
    /// Longest wait of one operation for a place.
    pub(crate) place_max: Duration,
}

impl<'a> Summer<'a> {
    pub(crate) fn new(memory: &'a dyn PoolMemory, turns: &'a Turns, is_over: &'a dyn Fn() -> bool) -> Self {
        Self { memory, turns, is_over, place_max: PLACE_MAX }
    }

    /// Sums of `heads` of one layer over `tokens`, which starts at a granule: `[granules, planes]`; the last granule covers its valid tokens
    /// only. Bytes enter in the order token, head, element, so that pools with different heads agree on the heads that both hold.
    pub(crate) fn layer(
        &self,
        map: &KvPoolMap,
        blocks: &BlockTable,
        heads: &Heads,
        group: usize,
        layer: usize,
        tokens: Range<u32>,
    ) -> Result<Vec<u64>, SumError> {
        let rows = layer_rows(map, blocks, heads, group, layer, tokens);
        let mut sums = Vec::with_capacity(rows.len());
        for part in rows.chunks(SUMS_MAX) {
            sums.extend(self.sum(part)?);
        }
        Ok(sums)
    }

    fn sum(&self, rows: &[Rows]) -> Result<Vec<u64>, SumError> {
        let sums = self.begin(rows).and_then(|operation| {
            operation.wait(Instant::now() + OPERATION_MAX).map_err(|error| match error {
                MemoryError::Late => SumError::Late,
                error => SumError::Failed(error),
            })
        });
        self.turns.leave(User::Verifier);
        sums
    }

    /// Begins an operation once there is a place for it.
    fn begin(&self, rows: &[Rows]) -> Result<Pending<Vec<u64>>, SumError> {
        let (by, mut rows) = (Instant::now() + self.place_max, rows.to_vec());
        loop {
            rows = match self.turns.begin(User::Verifier, None, rows, |rows| self.memory.try_checksum(rows)) {
                Ok(operation) => return Ok(operation),
                Err(rows) => rows,
            };
            if Instant::now() >= by || (self.is_over)() {
                return Err(SumError::Busy);
            }
            std::thread::sleep(BUSY_PAUSE);
        }
    }
}

/// [`Summer::layer`] of memory that nobody else uses.
pub(crate) fn layer_sums(
    memory: &dyn PoolMemory,
    map: &KvPoolMap,
    blocks: &BlockTable,
    heads: &Heads,
    group: usize,
    layer: usize,
    tokens: Range<u32>,
) -> Result<Vec<u64>, SumError> {
    Summer::new(memory, &Turns::default(), &|| false).layer(map, blocks, heads, group, layer, tokens)
}

/// Number of sums that [`layer_sums`] returns.
pub(crate) fn sums_of(layout: &KvLayout, group: usize, tokens: &Range<u32>) -> usize {
    tokens.len().div_ceil(GRANULE as usize) * layout.groups()[group].planes.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HeadShard;
    use crate::heads::Cut;
    use baton_memory::{HostPool, RemoteConfig, RemotePool};
    use baton_types::{BlockId, Dtype, GroupKind, KvGroup, KvPlane};

    /// One sum for each plane of a state, of all its bytes, whatever the positions are.
    #[test]
    fn a_state_is_one_granule_a_plane() {
        let plane = |name, heads, dim| KvPlane::try_new(name, heads, dim, Dtype::F32).unwrap();
        let planes = vec![plane("conv", 3, 5), plane("state", 2, 600)];
        let group = KvGroup { kind: GroupKind::State, layers: vec![0, 1], planes };
        let layout = KvLayout::try_new(16, vec![group]).unwrap();
        let map = KvPoolMap::try_new(layout.clone(), 3).unwrap();
        let heads = Cut::new(&layout, HeadShard::WHOLE, HeadShard::WHOLE).unwrap().source;
        let table = BlockTable { first: 3, blocks: vec![BlockId(1), BlockId(2)] };
        for positions in [64..65, 64..80, 64..79] {
            assert_eq!(sums_of(&layout, 0, &positions), 2);
            let places = layer_rows(&map, &table, &heads, 0, 1, positions);
            let bytes: Vec<_> = places.iter().map(|rows| rows.place(0)).collect();
            let planes = [0, 1].map(|plane| map.token_range(0, 1, BlockId(2), plane, 0..1));
            assert_eq!((bytes, planes[1].len()), (planes.to_vec(), 4800));
        }
    }

    const ROWS: [Rows; 1] = [Rows { start: 0, row_bytes: 8, stride: 8, rows: 1 }];

    /// A device with one place, which is taken.
    fn full() -> (std::sync::Arc<RemotePool>, Pending<Vec<u8>>) {
        let memory = RemotePool::new(4096, RemoteConfig { operations_max: 1, ..RemoteConfig::default() }).unwrap();
        memory.hold();
        let other = PoolMemory::read(&*memory, Rows::run(0, 8), Vec::new());
        (memory, other)
    }

    #[test]
    fn sums_wait_for_room_in_the_device() {
        let (memory, mut other) = full();
        let turns = Turns::default();
        let wanted = || false;
        let soon = Summer { place_max: Duration::from_millis(5), ..Summer::new(&*memory, &turns, &wanted) };
        assert_eq!(soon.sum(&ROWS), Err(SumError::Busy), "but not forever");
        let sums = std::thread::scope(|scope| {
            let sums = scope.spawn(|| Summer::new(&*memory, &turns, &|| false).sum(&ROWS));
            std::thread::sleep(Duration::from_millis(20));
            memory.release();
            sums.join().unwrap()
        });
        assert_eq!(sums, Ok(vec![baton_memory::checksum::sum(&[0; 8])]));
        assert!(other.poll_now().is_some());
    }

    #[test]
    fn sums_that_nobody_wants_any_more_wait_for_no_room() {
        let (memory, _other) = full();
        let (turns, begin) = (Turns::default(), Instant::now());
        let is_over = || begin.elapsed() > Duration::from_millis(5);
        assert_eq!(Summer::new(&*memory, &turns, &is_over).sum(&ROWS), Err(SumError::Busy));
        assert!(begin.elapsed() < PLACE_MAX / 2);
    }

    #[test]
    fn a_device_that_is_busy_and_one_that_fails_are_told_apart() {
        let outside = MemoryError::Outside { start: 4090, bytes: 4096 };
        let cases =
            [(SumError::Busy, "device_busy"), (SumError::Late, "device"), (SumError::Failed(outside), "device")];
        for (error, name) in cases {
            assert_eq!(HandoffFailure::from(error).name(), name);
        }
        let memory = RemotePool::new(4096, RemoteConfig::default()).unwrap();
        let turns = Turns::default();
        let failed = Summer::new(&*memory, &turns, &|| false).sum(&[Rows::run(4090, 8)]);
        assert!(matches!(failed, Err(SumError::Failed(_))), "{failed:?}");
    }

    /// Each byte of 1 to 33 tokens changes a sum, and no other byte does: in every plane, with all heads and with some of them.
    #[test]
    fn every_byte_of_one_to_thirty_three_tokens_counts() {
        let layout = KvLayout::llama(16, 1, 2, 4, Dtype::Bf16).unwrap();
        let map = KvPoolMap::try_new(layout.clone(), 3).unwrap();
        let region = HostPool::new(map.bytes()).unwrap();
        let noise: Vec<u8> =
            (0..map.bytes() as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 41) as u8).collect();
        region.copy_in(0, &noise);
        let table = BlockTable::from_start([2, 0, 1].map(BlockId).to_vec());
        let blocks = &table.blocks;
        let shards = [HeadShard::WHOLE, HeadShard::try_new(1, 2).unwrap()];
        for (shard, tokens) in shards.into_iter().flat_map(|shard| (1..=33).map(move |tokens| (shard, tokens))) {
            let heads = Cut::new(&layout, HeadShard::WHOLE, shard).unwrap().source;
            let sums = || layer_sums(&*region, &map, &table, &heads, 0, 0, 0..tokens).unwrap();
            let before = sums();
            let covered = |at: usize| {
                (0..tokens).any(|token| {
                    (0..2).any(|plane| {
                        let within = token % 16..token % 16 + 1;
                        let all = map.token_range(0, 0, blocks[token as usize / 16], plane, within);
                        // Two heads of 8 bytes each.
                        let first = heads[0][plane].start as usize * 8;
                        (all.start + first..all.start + first + heads[0][plane].len() * 8).contains(&at)
                    })
                })
            };
            for at in 0..map.bytes() {
                region.copy_in(at, &[noise[at] ^ 1]);
                assert_eq!(sums() != before, covered(at), "byte {at} of {tokens} tokens");
                region.copy_in(at, &noise[at..=at]);
            }
        }
    }
}
