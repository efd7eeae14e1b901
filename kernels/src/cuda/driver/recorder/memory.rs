//! Memory of a recorded device. Its addresses are no addresses of the host.

use crate::cuda::arguments::{Argument, In, Out};
use crate::cuda::driver::Address;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

/// No process has memory there.
const FIRST: u64 = 0x7a00_0000_0000_0000;

/// Between two allocations, so that what leaves one is found.
const GAP: u64 = 4096;

/// What new memory holds: NaN, as a number of any width.
pub(in crate::cuda::driver) const POISON: u8 = 0xff;

/// What happened to a byte since [`Memory::track`].
pub(in crate::cuda::driver) mod mark {
    /// It was read before anything was written to it.
    pub(in crate::cuda::driver) const READ: u8 = 1;
    pub(in crate::cuda::driver) const WRITTEN: u8 = 2;
    /// Written as part of an f32, or of a number of 16 bits in the class's format.
    pub(in crate::cuda::driver) const F32: u8 = 4;
    pub(in crate::cuda::driver) const HALF: u8 = 8;
}

/// Marks of each byte, by the address of its allocation.
pub(in crate::cuda::driver) type Marks = BTreeMap<u64, Vec<u8>>;

/// Allocations by their address.
#[derive(Debug, Default)]
pub(in crate::cuda::driver) struct Memory {
    allocations: BTreeMap<u64, Vec<u8>>,
    next: u64,
    /// Of accesses, while they are tracked.
    marks: Option<RefCell<Marks>>,
}

/// A number in device memory.
pub(super) trait Number: Copy {
    const BYTES: usize;
    const MARK: u8;
    fn from_bytes(bytes: &[u8]) -> Self;
    fn append(self, to: &mut Vec<u8>);
}

macro_rules! numbers {
    ($($number:ty = $mark:expr),*) => { $(
        impl Number for $number {
            const BYTES: usize = size_of::<$number>();
            const MARK: u8 = $mark;

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
numbers!(u8 = 0, u16 = mark::HALF, i32 = 0, u32 = 0, u64 = 0, f32 = mark::F32);

impl Memory {
    pub(super) fn alloc(&mut self, bytes: usize) -> Address {
        let at = FIRST + self.next;
        self.next += (bytes as u64 + GAP).next_multiple_of(GAP);
        self.allocations.insert(at, vec![POISON; bytes]);
        Address(at)
    }

    /// # Panics
    /// If it is not allocated.
    pub(in crate::cuda::driver) fn free(&mut self, at: Address) {
        assert!(self.allocations.remove(&at.0).is_some(), "{at:?} is freed and not allocated");
    }

    /// Bytes that are allocated.
    pub(super) fn allocated(&self) -> usize {
        self.allocations.values().map(Vec::len).sum()
    }

    /// Memory of another device, at the address that it has there.
    pub(in crate::cuda::driver) fn insert(&mut self, at: Address, bytes: usize) {
        self.allocations.insert(at.0, vec![POISON; bytes]);
    }

    /// Bytes of the allocation that begins here.
    pub(in crate::cuda::driver) fn whole(&mut self, at: Address) -> &mut [u8] {
        self.allocations.get_mut(&at.0).map_or(&mut [], |data| data.as_mut_slice())
    }

    /// Where each allocation begins.
    pub(in crate::cuda::driver) fn starts(&self) -> Vec<Address> {
        self.allocations.keys().copied().map(Address).collect()
    }

    /// Begins to mark what is read and written.
    pub(in crate::cuda::driver) fn track(&mut self) {
        self.marks = Some(RefCell::default());
    }

    /// Ends it: the marks of all allocations that were touched.
    pub(in crate::cuda::driver) fn tracked(&mut self) -> Marks {
        self.marks.take().map(RefCell::into_inner).unwrap_or_default()
    }

    /// Where some bytes are: their allocation, and their range in it.
    fn find(&self, at: Address, len: usize) -> (u64, Range<usize>) {
        let (first, data) = self.allocations.range(..=at.0).next_back().expect("an address below all memory");
        let from = (at.0 - first) as usize;
        let inside = from.checked_add(len).is_some_and(|end| end <= data.len());
        assert!(inside, "{len} bytes from {from} on, of {} at {first:#x}", data.len());
        (*first, from..from + len)
    }

    fn note(&self, first: u64, range: &Range<usize>, mark: u8) {
        let Some(marks) = &self.marks else { return };
        let mut marks = marks.borrow_mut();
        let of = marks.entry(first).or_insert_with(|| vec![0; self.allocations[&first].len()]);
        for byte in &mut of[range.clone()] {
            if mark != mark::READ || *byte & mark::WRITTEN == 0 {
                *byte |= mark;
            }
        }
    }

    /// The bytes at an address.
    ///
    /// # Panics
    /// If they are not of one allocation.
    pub(super) fn bytes(&self, at: Address, len: usize) -> &[u8] {
        let (first, range) = self.find(at, len);
        self.note(first, &range, mark::READ);
        &self.allocations[&first][range]
    }

    /// The bytes at an address, to be written.
    ///
    /// # Panics
    /// As [`Memory::bytes`].
    pub(in crate::cuda::driver) fn bytes_mut(&mut self, at: Address, len: usize) -> &mut [u8] {
        self.written(at, len, 0)
    }

    /// The same, of numbers with this mark.
    fn written(&mut self, at: Address, len: usize, of: u8) -> &mut [u8] {
        let (first, range) = self.find(at, len);
        self.note(first, &range, mark::WRITTEN | of);
        &mut self.allocations.get_mut(&first).expect("found")[range]
    }

    /// `len` numbers at an address.
    pub(super) fn at<T: Number>(&self, at: Address, len: usize) -> Vec<T> {
        self.bytes(at, len * T::BYTES).chunks_exact(T::BYTES).map(T::from_bytes).collect()
    }

    /// Stores numbers at an address.
    pub(super) fn put<T: Number>(&mut self, at: Address, numbers: &[T]) {
        let mut bytes = Vec::with_capacity(numbers.len() * T::BYTES);
        numbers.iter().for_each(|number| number.append(&mut bytes));
        self.written(at, bytes.len(), T::MARK).copy_from_slice(&bytes);
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
    pub(in crate::cuda::driver) fn element<T: Argument>(&self, from: In<T>, index: usize) -> T {
        T::take(&mut self.bytes(from.address().expect("a pointer to structs").plus(index * T::BYTES), T::BYTES))
    }
}
