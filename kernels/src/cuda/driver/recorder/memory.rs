//! Memory of a recorded device. Its addresses are no addresses of the host.

use crate::cuda::arguments::{Argument, In, Out};
use crate::cuda::driver::Address;
use std::collections::BTreeMap;

/// No process has memory there.
const FIRST: u64 = 0x7a00_0000_0000_0000;

/// Between two allocations, so that what leaves one is found.
const GAP: u64 = 4096;

/// What new memory holds: NaN, as a number of any width.
const POISON: u8 = 0xff;

/// Allocations by their address.
#[derive(Debug, Default)]
pub(super) struct Memory {
    allocations: BTreeMap<u64, Vec<u8>>,
    next: u64,
}

/// A number in device memory.
pub(super) trait Number: Copy {
    const BYTES: usize;
    fn from_bytes(bytes: &[u8]) -> Self;
    fn append(self, to: &mut Vec<u8>);
}

macro_rules! numbers {
    ($($number:ty),*) => { $(
        impl Number for $number {
            const BYTES: usize = size_of::<$number>();

            fn from_bytes(bytes: &[u8]) -> Self {
                let mut whole = [0; size_of::<$number>()];
                whole.copy_from_slice(bytes);
                Self::from_le_bytes(whole)
            }

            fn append(self, to: &mut Vec<u8>) {
                to.extend_from_slice(&self.to_le_bytes());
            }
        }
    )* };
}
numbers!(u8, u16, i32, u32, u64, f32);

impl Memory {
    pub(super) fn alloc(&mut self, bytes: usize) -> Address {
        let at = FIRST + self.next;
        self.next += (bytes as u64 + GAP).next_multiple_of(GAP);
        self.allocations.insert(at, vec![POISON; bytes]);
        Address(at)
    }

    /// # Panics
    /// If it is not allocated.
    pub(super) fn free(&mut self, at: Address) {
        assert!(self.allocations.remove(&at.0).is_some(), "{at:?} is freed and not allocated");
    }

    /// Bytes that are allocated.
    pub(super) fn allocated(&self) -> usize {
        self.allocations.values().map(Vec::len).sum()
    }

    /// The bytes at an address.
    ///
    /// # Panics
    /// If they are not of one allocation.
    pub(super) fn bytes(&self, at: Address, len: usize) -> &[u8] {
        let (first, data) = self.allocations.range(..=at.0).next_back().expect("an address below all memory");
        let from = (at.0 - first) as usize;
        data.get(from..from + len)
            .unwrap_or_else(|| panic!("{len} bytes from {from} on, of {} at {first:#x}", data.len()))
    }

    /// The bytes at an address, to be written.
    ///
    /// # Panics
    /// As [`Memory::bytes`].
    pub(super) fn bytes_mut(&mut self, at: Address, len: usize) -> &mut [u8] {
        let (first, data) = self.allocations.range_mut(..=at.0).next_back().expect("an address below all memory");
        let (from, size) = ((at.0 - first) as usize, data.len());
        data.get_mut(from..from + len).unwrap_or_else(|| panic!("{len} bytes from {from} on, of {size} at {first:#x}"))
    }

    /// `len` numbers at an address.
    pub(super) fn at<T: Number>(&self, at: Address, len: usize) -> Vec<T> {
        self.bytes(at, len * T::BYTES).chunks_exact(T::BYTES).map(T::from_bytes).collect()
    }

    /// Stores numbers at an address.
    pub(super) fn put<T: Number>(&mut self, at: Address, numbers: &[T]) {
        let mut bytes = Vec::with_capacity(numbers.len() * T::BYTES);
        numbers.iter().for_each(|number| number.append(&mut bytes));
        self.bytes_mut(at, bytes.len()).copy_from_slice(&bytes);
    }

    /// The numbers from index `first` on behind a pointer.
    ///
    /// # Panics
    /// If it is null.
    pub(super) fn read<T: Number>(&self, from: In<T>, first: usize, len: usize) -> Vec<T> {
        self.at(from.address().expect("a pointer to numbers").plus(first * T::BYTES), len)
    }

    /// As [`Memory::read`], of what a kernel also writes.
    pub(super) fn read_out<T: Number>(&self, from: Out<T>, first: usize, len: usize) -> Vec<T> {
        self.at(from.address().expect("a pointer to numbers").plus(first * T::BYTES), len)
    }

    /// Stores numbers from index `first` on behind a pointer.
    ///
    /// # Panics
    /// If it is null.
    pub(super) fn write<T: Number>(&mut self, to: Out<T>, first: usize, numbers: &[T]) {
        self.put(to.address().expect("a pointer to numbers").plus(first * T::BYTES), numbers);
    }

    /// The struct at an index behind a pointer.
    pub(super) fn element<T: Argument>(&self, from: In<T>, index: usize) -> T {
        T::take(&mut self.bytes(from.address().expect("a pointer to structs").plus(index * T::BYTES), T::BYTES))
    }
}
