//! The flat map from a block's hash to its holders.
//!
//! Workers choose the hashes that they report, so a hash's place comes from a multiplication keyed with a secret: whoever does not know it
//! cannot give many hashes one place. The top bits of the place choose one of 4,096 segments, others the position in it. A segment is an open-addressing table that grows independently. So no operation moves more than a few thousand entries, and memory is
//! proportional to the contents. An entry is 32 aligned bytes: it never straddles a cache line.

use super::holders::{Added, Holders, Spill};
use super::slots::{FAR_WORDS, SlotSet};
use crate::PrefixHash;
use std::hint::black_box;

const SEGMENT_BITS: u32 = 12;
/// Fewest entries of a non-empty segment.
const ENTRIES_MIN: usize = 8;
/// Hashes that are looked up together. A core has at most a few dozen memory reads in flight.
pub(super) const BATCH: usize = 32;

#[derive(Clone, Copy, Default)]
#[repr(align(32))]
struct Entry {
    key: [u64; 2],
    /// Empty where the entry is vacant.
    holders: Holders,
}

#[derive(Default)]
struct Segment {
    entries: Vec<Entry>,
    used: usize,
}

pub(super) struct Table {
    segments: Vec<Segment>,
    secret: Secret,
    spill: Spill,
    held: usize,
    blocks_max: usize,
    /// The segment that is swept next.
    cursor: usize,
}

fn key(hash: &PrefixHash) -> [u64; 2] {
    let hash = u128::from_le_bytes(hash.0);
    [hash as u64, (hash >> 64) as u64]
}

/// Random numbers that no worker knows.
#[derive(Clone, Copy)]
struct Secret([u64; 2]);

impl Secret {
    fn place(self, key: [u64; 2]) -> HashedKey {
        let product = u128::from(key[0] ^ self.0[0]) * u128::from(key[1] ^ self.0[1]);
        HashedKey(product as u64 ^ (product >> 64) as u64)
    }
}

/// Where a key belongs.
#[derive(Clone, Copy, Default)]
struct HashedKey(u64);

impl HashedKey {
    fn segment(self) -> usize {
        (self.0 >> (64 - SEGMENT_BITS)) as usize
    }

    /// The first position in a segment of this many entries.
    fn home(self, entries: usize) -> usize {
        let fraction = (self.0 << SEGMENT_BITS) >> 32;
        ((fraction * entries as u64) >> 32) as usize
    }
}

impl Segment {
    fn home(&self, place: HashedKey) -> usize {
        place.home(self.entries.len())
    }

    fn after(&self, position: usize) -> usize {
        if position + 1 == self.entries.len() { 0 } else { position + 1 }
    }

    /// Position of the key, or of the vacant entry where it would be. `None` if there are no entries.
    fn seek(&self, key: [u64; 2], place: HashedKey) -> Option<usize> {
        if self.entries.is_empty() {
            return None;
        }
        let mut position = self.home(place);
        // Half of the entries are always vacant.
        while self.entries[position].key != key && !self.entries[position].holders.is_empty() {
            position = self.after(position);
        }
        Some(position)
    }

    /// Position of the key.
    fn find(&self, key: [u64; 2], place: HashedKey) -> Option<usize> {
        self.seek(key, place).filter(|position| !self.entries[*position].holders.is_empty())
    }

    /// Grows by half if one more entry would leave less than half of them vacant. Then three of four keys are in their first position, and
    /// the reads of a lookup need not wait for one another.
    fn make_room(&mut self, secret: Secret) {
        let entries = self.entries.len();
        if 2 * (self.used + 1) <= entries {
            return;
        }
        let larger = vec![Entry::default(); ENTRIES_MIN.max(entries + entries / 2)];
        for entry in std::mem::replace(&mut self.entries, larger) {
            if !entry.holders.is_empty() {
                self.put(entry, secret.place(entry.key));
            }
        }
    }

    /// Writes an entry whose key is absent. There must be room.
    fn put(&mut self, entry: Entry, place: HashedKey) {
        let mut position = self.home(place);
        while !self.entries[position].holders.is_empty() {
            position = self.after(position);
        }
        self.entries[position] = entry;
    }

    /// Vacates an entry, and moves later entries up that would not be found across the hole.
    fn erase(&mut self, mut hole: usize, secret: Secret) {
        let entries = self.entries.len();
        let distance = |from: usize, to: usize| if to >= from { to - from } else { to + entries - from };
        let mut next = self.after(hole);
        while !self.entries[next].holders.is_empty() {
            if distance(self.home(secret.place(self.entries[next].key)), next) >= distance(hole, next) {
                self.entries[hole] = self.entries[next];
                hole = next;
            }
            next = self.after(next);
        }
        self.entries[hole] = Entry::default();
        self.used -= 1;
    }
}

impl Table {
    /// An empty table of at most `blocks_max` hashes, whose places come from the secret.
    pub(super) fn new(blocks_max: usize, secret: [u64; 2]) -> Self {
        let mut segments = Vec::new();
        segments.resize_with(1 << SEGMENT_BITS, Segment::default);
        // Few blocks are on many workers, so a set for each sixteenth block is ample, at 8 bytes a block.
        let spill = Spill::new(blocks_max / 16);
        Self { segments, secret: Secret(secret), spill, held: 0, blocks_max, cursor: 0 }
    }

    /// Hashes with holders, including retired slots.
    pub(super) fn held(&self) -> usize {
        self.held
    }

    pub(super) fn add(&mut self, hash: &PrefixHash, slot: usize) -> Added {
        let key = key(hash);
        let place = self.secret.place(key);
        let segment = &mut self.segments[place.segment()];
        if let Some(position) = segment.find(key, place) {
            return segment.entries[position].holders.add(slot, &mut self.spill);
        }
        if self.held == self.blocks_max {
            return Added::Refused;
        }
        let mut holders = Holders::default();
        holders.add(slot, &mut self.spill);
        segment.make_room(self.secret);
        segment.put(Entry { key, holders }, place);
        segment.used += 1;
        self.held += 1;
        Added::New
    }

    /// Removes the slot; returns whether it held the block.
    pub(super) fn take(&mut self, hash: &PrefixHash, slot: usize) -> bool {
        let key = key(hash);
        let place = self.secret.place(key);
        let segment = &mut self.segments[place.segment()];
        let Some(position) = segment.find(key, place) else { return false };
        let held = segment.entries[position].holders.take(slot, &mut self.spill);
        if segment.entries[position].holders.is_empty() {
            segment.erase(position, self.secret);
            self.held -= 1;
        }
        held
    }

    /// Holders of up to [`BATCH`] hashes. All first positions are read before any is inspected, so that memory reads overlap.
    pub(super) fn holders<'a>(&self, hashes: impl Iterator<Item = &'a PrefixHash>) -> ([Holders; BATCH], usize) {
        let mut keys = [[0; 2]; BATCH];
        let mut places = [HashedKey::default(); BATCH];
        let mut first = [Entry::default(); BATCH];
        let mut out = [Holders::default(); BATCH];
        let (mut count, mut nearby) = (0, 0);
        for (hash, ((wanted, place), entry)) in hashes.zip(keys.iter_mut().zip(&mut places).zip(&mut first)) {
            *wanted = key(hash);
            *place = self.secret.place(*wanted);
            let segment = &self.segments[place.segment()];
            let home = segment.home(*place);
            if let Some(found) = segment.entries.get(home) {
                *entry = *found;
                // If the first position has another key, the next one is needed, often in the next cache line.
                if let Some(next) = segment.entries.get(home + 1) {
                    nearby ^= next.key[1];
                }
            }
            count += 1;
        }
        black_box(nearby);
        for i in 0..count {
            out[i] = if first[i].key == keys[i] || first[i].holders.is_empty() {
                first[i].holders
            } else {
                let segment = &self.segments[places[i].segment()];
                segment
                    .find(keys[i], places[i])
                    .map_or(Holders::default(), |position| segment.entries[position].holders)
            };
        }
        (out, count)
    }

    /// The slots beyond the first 64 of `holders`.
    pub(super) fn far_set(&self, holders: &Holders) -> [u64; FAR_WORDS] {
        holders.far_set(&self.spill)
    }

    /// Removes the slots of `dead` from the next segment; calls `taken` with the slot for each block that it held.
    pub(super) fn sweep(&mut self, dead: &SlotSet, mut taken: impl FnMut(usize)) {
        let segment = &mut self.segments[self.cursor];
        self.cursor = (self.cursor + 1) % (1 << SEGMENT_BITS);
        let mut position = 0;
        while position < segment.entries.len() {
            let holders = &mut segment.entries[position].holders;
            if !holders.is_empty() {
                holders.take_all(dead, &mut self.spill, &mut taken);
                if holders.is_empty() {
                    // Another entry may have moved here: check again.
                    segment.erase(position, self.secret);
                    self.held -= 1;
                    continue;
                }
            }
            position += 1;
        }
    }

    /// Entries that the next sweep reads; at least 1.
    pub(super) fn next_sweep(&self) -> usize {
        self.segments[self.cursor].entries.len().max(1)
    }

    /// Most entries in a row of which none is vacant.
    #[cfg(test)]
    pub(super) fn longest_run(&self) -> usize {
        let runs = |s: &Segment| s.entries.split(|e| e.holders.is_empty()).map(<[Entry]>::len).max();
        self.segments.iter().filter_map(runs).max().unwrap_or(0)
    }

    #[cfg(test)]
    pub(super) fn spilled(&self) -> usize {
        self.spill.used()
    }
}
