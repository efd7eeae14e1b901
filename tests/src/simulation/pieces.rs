//! The defect `PiecewiseReservation`: offers that wait take blocks one by one as they come free, each in its turn, and keep what they have.

use super::receive::Waiting;
use super::worker::Worker;
use baton_kv_cache::Lease;

/// Hands out what is free, a block at a time. Offers that are whole thereby wait no longer: their keys, with what they have.
pub(super) fn take_pieces(worker: &mut Worker) -> Vec<(u64, Lease)> {
    let size = worker.memory.map.layout().block_tokens() as usize;
    let incoming = &worker.incoming;
    worker.waiting.retain(|waiting| incoming.get(&waiting.key).is_some_and(|i| i.sink.state() == "claimed"));
    let pool = &worker.pool;
    while worker.waiting.iter_mut().any(|waiting| !waiting.is_whole(size) && waiting.take_one(pool)) {
        // In turn with the others.
        worker.waiting.rotate_left(1);
    }
    let all = std::mem::take(&mut worker.waiting);
    let (whole, part): (Vec<_>, Vec<_>) = all.into_iter().partition(|waiting| waiting.is_whole(size));
    worker.waiting = part.into();
    whole.into_iter().filter_map(|waiting| Some((waiting.key, waiting.part?))).collect()
}

impl Waiting {
    fn is_whole(&self, size: usize) -> bool {
        self.part.as_ref().is_some_and(|part| part.blocks_min() == self.tokens.div_ceil(size))
    }

    fn take_one(&mut self, pool: &baton_kv_cache::SharedPool) -> bool {
        match &mut self.part {
            Some(part) => part.grow(1),
            None => {
                self.part = pool.try_lease(&[1]);
                self.part.is_some()
            }
        }
    }
}
