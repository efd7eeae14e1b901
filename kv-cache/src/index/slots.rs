//! Small numbers for workers, so that a block's holders are bits.

use std::ops::Range;

/// Slots that have a bit in every entry: enough for a cluster of ordinary size.
pub(super) const NEAR: usize = 64;
/// Words of the slots beyond [`NEAR`].
pub(super) const FAR_WORDS: usize = 16;
/// Number of slots. More than workers, so that a new snapshot gets a slot while the worker's previous one is still being swept.
pub(super) const SLOTS: usize = NEAR + 64 * FAR_WORDS;

/// A set of slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SlotSet {
    pub(super) near: u64,
    pub(super) far: [u64; FAR_WORDS],
}

impl SlotSet {
    pub(super) fn insert(&mut self, slot: usize) {
        *self.word(slot) |= 1 << (slot % 64);
    }

    pub(super) fn remove(&mut self, slot: usize) {
        *self.word(slot) &= !(1 << (slot % 64));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.near == 0 && self.far == [0; FAR_WORDS]
    }

    /// The slots that are in both sets.
    pub(super) fn and(&self, other: &Self) -> Self {
        self.of_each(other, |a, b| a & b)
    }

    /// The slots that are not in the other set.
    pub(super) fn and_not(&self, other: &Self) -> Self {
        self.of_each(other, |a, b| a & !b)
    }

    fn of_each(&self, other: &Self, of: impl Fn(u64, u64) -> u64) -> Self {
        Self { near: of(self.near, other.near), far: std::array::from_fn(|i| of(self.far[i], other.far[i])) }
    }

    /// The lowest slot that is not in the set.
    pub(super) fn lowest_absent(&self) -> Option<usize> {
        let words = std::iter::once(self.near).chain(self.far);
        words.enumerate().find(|(_, word)| *word != u64::MAX).map(|(i, word)| 64 * i + word.trailing_ones() as usize)
    }

    /// Words of `far` that may hold a slot.
    pub(super) fn far_words(&self) -> Range<usize> {
        0..self.far.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1)
    }

    /// The slots in ascending order.
    pub(super) fn iter(&self) -> impl Iterator<Item = usize> {
        let words = std::iter::once(self.near).chain(self.far);
        words.enumerate().flat_map(|(i, word)| bits(word).map(move |bit| 64 * i + bit))
    }

    fn word(&mut self, slot: usize) -> &mut u64 {
        if slot < NEAR { &mut self.near } else { &mut self.far[slot / 64 - 1] }
    }
}

/// Positions of the bits that are set, ascending.
pub(super) fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = word.trailing_zeros() as usize;
        word &= word.wrapping_sub(1);
        (bit < 64).then_some(bit)
    })
}
