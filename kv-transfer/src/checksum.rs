//! Which rows of a pool a checksum covers, and the sums of a layer.
//!
//! One sum covers 16 tokens of one plane of one layer, over the valid bytes only ([`baton_memory::checksum`]). The memory computes it, where
//! it is.

use crate::heads::Heads;
pub(crate) use baton_memory::checksum::ALGORITHM;
use baton_memory::{MemoryError, PoolMemory, Rows};
use baton_types::{BlockTable, KvLayout, KvPoolMap};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Tokens that one sum covers.
pub(crate) const GRANULE: u32 = KvLayout::GRANULE_TOKENS;
/// Most sums of one operation: a device does not compute longer without a chance for others, and a list of rows stays small.
const SUMS_MAX: usize = 4096;
/// Longest wait for one operation, far longer than a device takes for that many sums.
const SUM_WAIT: Duration = Duration::from_secs(30);
/// Pause before another attempt at an operation for which a device had no room.
const BUSY_PAUSE: Duration = Duration::from_micros(100);

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
    let block_tokens = map.layout().block_tokens();
    let planes = &map.layout().groups()[group].planes;
    let mut rows = Vec::with_capacity((tokens.len() / GRANULE as usize + 1) * planes.len());
    for first in tokens.clone().step_by(GRANULE as usize) {
        let block = blocks.get((first / block_tokens) as usize).expect("tables were checked to hold what is summed");
        let within = first % block_tokens..(first % block_tokens + GRANULE.min(tokens.end - first));
        for (plane, shape) in planes.iter().enumerate() {
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

/// Sums of `heads` of one layer over `tokens`, which starts at a granule: `[granules, planes]`; the last granule covers its valid tokens
/// only. Bytes enter in the order token, head, element, so that pools with different heads agree on the heads that both hold.
pub(crate) fn layer_sums(
    memory: &dyn PoolMemory,
    map: &KvPoolMap,
    blocks: &BlockTable,
    heads: &Heads,
    group: usize,
    layer: usize,
    tokens: Range<u32>,
) -> Result<Vec<u64>, MemoryError> {
    let rows = layer_rows(map, blocks, heads, group, layer, tokens);
    let mut sums = Vec::with_capacity(rows.len());
    for part in rows.chunks(SUMS_MAX) {
        sums.extend(sums_by(memory, part, Instant::now() + SUM_WAIT)?);
    }
    Ok(sums)
}

/// Tries again while connections fill the device.
fn sums_by(memory: &dyn PoolMemory, rows: &[Rows], deadline: Instant) -> Result<Vec<u64>, MemoryError> {
    loop {
        match memory.checksum(rows.to_vec()).wait(deadline) {
            Err(MemoryError::Busy { .. }) if Instant::now() < deadline => std::thread::sleep(BUSY_PAUSE),
            ended => return ended,
        }
    }
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
    use baton_types::{BlockId, Dtype};

    #[test]
    fn sums_wait_for_room_in_the_device() {
        let memory = RemotePool::new(4096, RemoteConfig { operations_max: 1, ..RemoteConfig::default() }).unwrap();
        memory.hold();
        let mut other = PoolMemory::read(&*memory, Rows::run(0, 8), Vec::new());
        let rows = [Rows::run(0, 8)];
        let late = sums_by(&*memory, &rows, Instant::now() + Duration::from_millis(5));
        assert!(matches!(late, Err(MemoryError::Busy { .. })), "but not forever");
        let sums = std::thread::scope(|scope| {
            let sums = scope.spawn(|| sums_by(&*memory, &rows, Instant::now() + SUM_WAIT));
            std::thread::sleep(Duration::from_millis(20));
            memory.release();
            sums.join().unwrap()
        });
        assert_eq!(sums, Ok(vec![baton_memory::checksum::sum(&[0; 8])]));
        assert!(other.poll_now().is_some());
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
