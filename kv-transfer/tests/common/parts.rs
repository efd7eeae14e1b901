//! Handoffs and gets of a part: what is there before, what may change, and what must not.

use super::{Node, PATIENCE, commit};
use baton_kv_transfer::*;
use baton_memory::Rows;
use baton_types::*;
use std::ops::Range;
use std::time::Instant;

/// By when an operation on a pool must have ended.
fn soon() -> Instant {
    Instant::now() + PATIENCE
}

/// How many leading tokens of an offer a sink has.
pub type Cached = Box<dyn Fn(&ReserveOffer) -> u32 + Send>;

pub fn none_cached() -> Cached {
    Box::new(|_| 0)
}

impl Node {
    /// From now on its worker has so much of what is offered.
    pub fn cache(&self, cached: impl Fn(&ReserveOffer) -> u32 + Send + 'static) {
        *self.sink.cached.lock().unwrap() = Box::new(cached);
    }

    /// Where each of these positions is that moves, in an order that no block size enters: of a window those that the position after them needs,
    /// from a whole granule on, and of states the one behind them.
    pub fn places(&self, blocks: &BlockTables, positions: Range<u32>) -> Vec<Range<usize>> {
        let size = self.map.layout().block_tokens();
        let mut places = Vec::new();
        for (g, group) in self.map.layout().groups().iter().enumerate() {
            for (layer, plane) in (0..group.layers.len()).flat_map(|l| (0..group.planes.len()).map(move |p| (l, p))) {
                if group.kind == GroupKind::State {
                    let at = (positions.end - 1) / size;
                    let state = blocks.0[g].get(at as usize).expect("it is held");
                    places.push(self.map.token_range(g, layer, state, plane, 0..1));
                    continue;
                }
                // One of both sides has blocks of a granule, in tests with windows.
                let granule = KvLayout::GRANULE_TOKENS as usize;
                let needed = group.kind.first_for(positions.end as usize, granule) * granule;
                for token in positions.start.max(needed as u32)..positions.end {
                    let (block, at) = (blocks.0[g].get((token / size) as usize).expect("it is held"), token % size);
                    places.push(self.map.token_range(g, layer, block, plane, at..at + 1));
                }
            }
        }
        places
    }

    pub fn read_all(&self, places: &[Range<usize>]) -> Vec<u8> {
        // All at the same time: each read takes long if the pool is remote.
        let read = |place: &Range<usize>| self.memory.read(Rows::run(place.start, place.len()), Vec::new());
        let reads: Vec<_> = places.iter().map(read).collect();
        reads.into_iter().flat_map(|read| read.wait(soon()).unwrap()).collect()
    }

    pub fn write_all(&self, writes: impl IntoIterator<Item = (usize, Vec<u8>)>) {
        let write = |(at, bytes): (usize, Vec<u8>)| self.memory.write(Rows::run(at, bytes.len()), bytes);
        let writes: Vec<_> = writes.into_iter().map(write).collect();
        writes.into_iter().for_each(|write| drop(write.wait(soon()).unwrap()));
    }

    pub fn read(&self, at: usize, out: &mut [u8]) {
        self.memory.read_by(soon(), at, out).unwrap();
    }

    pub fn write(&self, at: usize, bytes: &[u8]) {
        self.memory.write_by(soon(), at, bytes).unwrap();
    }

    /// Every byte of the pool.
    pub fn whole_pool(&self) -> Vec<u8> {
        let mut all = vec![0; self.map.bytes()];
        self.read(0, &mut all);
        all
    }

    /// Fills the whole pool with noise.
    pub fn fill_pool(&self, seed: u64) {
        let all = self.map.layout().groups().iter().map(|_| (0..self.map.blocks(0)).map(BlockId).collect());
        self.fill(&BlockTables::from_start(GroupBlocks(all.collect())), seed);
    }

    /// Begins to read positions of what a peer serves, as request `r`, if that can be.
    pub fn get_part(
        &self,
        from: &Peer,
        name: &str,
        positions: Range<u32>,
        deadline: Instant,
    ) -> (Result<GetHandle, TransferError>, BlockTables) {
        let count = self.map.layout().blocks_for(positions.len());
        let hold = self.pool.take(count, 3).expect("the pool has room");
        let (blocks, name) = (hold.blocks.clone(), name.as_bytes().to_vec());
        let (request_id, from_token, tokens) = (RequestId::try_new("r").unwrap(), positions.start, positions.end);
        let request = GetRequest { request_id, name, from: from_token, tokens, blocks: blocks.clone(), deadline, hold };
        (self.transfer.get(from, request), blocks)
    }

    /// Takes what was adopted under this name, of which `cached` positions were there before, and puts what must be in its pool then into
    /// `pool`.
    pub fn take_part(
        &self,
        request: &str,
        (source, blocks): (&Node, &BlockTables),
        positions: Range<u32>,
        pool: &mut [u8],
    ) -> VerifiedHandoff {
        let handoff = self.sink.take_adopted(request).expect("adopted");
        assert_eq!((handoff.kv_tokens, handoff.cached_tokens), (positions.end, positions.start));
        assert_eq!(handoff.tokens, commit(positions.end).tokens);
        let moved = source.places(blocks, positions.clone());
        assert_eq!(handoff.bytes, moved.iter().map(|place| place.len() as u64).sum::<u64>());
        overlay(pool, &self.places(handoff.hold.blocks(), positions), &source.read_all(&moved));
        handoff
    }
}

/// Puts bytes where they belong.
pub fn overlay(pool: &mut [u8], places: &[Range<usize>], bytes: &[u8]) {
    let mut at = 0;
    for place in places {
        pool[place.clone()].copy_from_slice(&bytes[at..at + place.len()]);
        at += place.len();
    }
    assert_eq!(at, bytes.len());
}
