//! The set of workers that hold one block, in 16 bytes.

use super::slots::{FAR_WORDS, NEAR, SlotSet, bits};

/// A set of slots. The first 64 are bits of `near`. `far` holds up to four others, each as a 16-bit slot number (never 0), or, with its
/// highest bit set, the number of a set in [`Spill`]. Slot numbers are below 2^15, so that bit distinguishes the two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Holders {
    pub(super) near: u64,
    far: u64,
}

const SPILLED: u64 = 1 << 63;
const LANES: u32 = 4;

/// Result of an addition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Added {
    New,
    Already,
    /// There is no room.
    Refused,
}

/// Sets of slots beyond the first 64 that do not fit the lanes. Bounded.
pub(super) struct Spill {
    sets: Vec<[u64; FAR_WORDS]>,
    free: Vec<u32>,
    sets_max: usize,
}

impl Spill {
    pub(super) fn new(sets_max: usize) -> Self {
        Self { sets: Vec::new(), free: Vec::new(), sets_max: sets_max.min(u32::MAX as usize) }
    }

    fn put(&mut self, set: [u64; FAR_WORDS]) -> Option<u32> {
        if let Some(id) = self.free.pop() {
            self.sets[id as usize] = set;
            return Some(id);
        }
        let id = (self.sets.len() < self.sets_max).then_some(self.sets.len() as u32)?;
        self.sets.push(set);
        Some(id)
    }

    #[cfg(test)]
    pub(super) fn used(&self) -> usize {
        self.sets.len() - self.free.len()
    }
}

impl Holders {
    pub(super) fn is_empty(&self) -> bool {
        self.near | self.far == 0
    }

    /// Whether slots beyond the first 64 are in the set.
    pub(super) fn has_far(&self) -> bool {
        self.far != 0
    }

    pub(super) fn add(&mut self, slot: usize, spill: &mut Spill) -> Added {
        if slot < NEAR {
            let before = self.near;
            self.near |= 1 << slot;
            return if self.near == before { Added::Already } else { Added::New };
        }
        let (word, bit) = (slot / 64 - 1, 1 << (slot % 64));
        if let Some(id) = self.spilled() {
            let word = &mut spill.sets[id][word];
            let already = *word & bit != 0;
            *word |= bit;
            return if already { Added::Already } else { Added::New };
        }
        let mut room = None;
        for lane in 0..LANES {
            match self.lane(lane) {
                0 => room = Some(lane),
                taken if taken == slot => return Added::Already,
                _ => {}
            }
        }
        if let Some(lane) = room {
            self.far |= (slot as u64) << (16 * lane);
            return Added::New;
        }
        let mut set = self.far_set(spill);
        set[word] |= bit;
        let Some(id) = spill.put(set) else { return Added::Refused };
        self.far = SPILLED | u64::from(id);
        Added::New
    }

    /// Removes the slot; returns whether it was in the set.
    pub(super) fn take(&mut self, slot: usize, spill: &mut Spill) -> bool {
        if slot < NEAR {
            let before = self.near;
            self.near &= !(1 << slot);
            return self.near != before;
        }
        let (word, bit) = (slot / 64 - 1, 1 << (slot % 64));
        if let Some(id) = self.spilled() {
            let set = &mut spill.sets[id];
            let held = set[word] & bit != 0;
            set[word] &= !bit;
            self.unspill(id, spill);
            return held;
        }
        let lane = (0..LANES).find(|lane| self.lane(*lane) == slot);
        lane.inspect(|lane| self.far &= !(0xffff << (16 * lane))).is_some()
    }

    /// Removes all slots of `dead` and passes each to `taken`.
    pub(super) fn take_all(&mut self, dead: &SlotSet, spill: &mut Spill, mut taken: impl FnMut(usize)) {
        bits(self.near & dead.near).for_each(&mut taken);
        self.near &= !dead.near;
        if self.far == 0 {
            return;
        }
        let set = self.far_set(spill);
        for (i, word) in set.iter().enumerate() {
            for bit in bits(word & dead.far[i]) {
                let slot = NEAR + 64 * i + bit;
                self.take(slot, spill);
                taken(slot);
            }
        }
    }

    /// The slots beyond the first 64, as bits.
    pub(super) fn far_set(&self, spill: &Spill) -> [u64; FAR_WORDS] {
        if let Some(id) = self.spilled() {
            return spill.sets[id];
        }
        let mut set = [0; FAR_WORDS];
        for slot in (0..LANES).map(|lane| self.lane(lane)).filter(|slot| *slot != 0) {
            set[slot / 64 - 1] |= 1 << (slot % 64);
        }
        set
    }

    /// Moves the set back into lanes once half of them suffice. A larger threshold would move a block that comes and goes each time.
    fn unspill(&mut self, id: usize, spill: &mut Spill) {
        let set = spill.sets[id];
        if set.iter().map(|word| word.count_ones()).sum::<u32>() > LANES / 2 {
            return;
        }
        self.far = 0;
        let slots = set.iter().enumerate().flat_map(|(i, word)| bits(*word).map(move |bit| NEAR + 64 * i + bit));
        slots.enumerate().for_each(|(lane, slot)| self.far |= (slot as u64) << (16 * lane));
        spill.free.push(id as u32);
    }

    fn lane(&self, lane: u32) -> usize {
        (self.far >> (16 * lane)) as usize & 0xffff
    }

    fn spilled(&self) -> Option<usize> {
        (self.far & SPILLED != 0).then_some(self.far as u32 as usize)
    }
}
