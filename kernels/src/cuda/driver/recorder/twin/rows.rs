//! Copies and checksums of pool memory.

use crate::cuda::arguments::pool::{CopyRows, RowsCopy, StridedRows, SumRows};
use crate::cuda::driver::recorder::memory::Memory;
use baton_memory::checksum;

pub(super) fn copy(a: &CopyRows, memory: &mut Memory) {
    let (from, to) = (a.from.address().expect("a source"), a.to.address().expect("a destination"));
    for index in 0..a.count as usize {
        let copy: RowsCopy = memory.element(a.copies, index);
        let [source, target] = [copy.from, copy.to].map(|rows| places(&rows).collect::<Vec<_>>());
        assert_eq!(source.len(), target.len(), "both sides have the same number of bytes");
        for (source, target) in source.into_iter().zip(target) {
            let byte = memory.bytes(from.plus(source), 1)[0];
            memory.bytes_mut(to.plus(target), 1)[0] = byte;
        }
    }
}

/// Where each byte of rows is.
fn places(rows: &StridedRows) -> impl Iterator<Item = usize> {
    let StridedRows { start, row_bytes, stride, rows } = *rows;
    (0..rows).flat_map(move |row| (start + row * stride..start + row * stride + row_bytes).map(|at| at as usize))
}

pub(super) fn sum(a: &SumRows, memory: &mut Memory) {
    let pool = a.pool.address().expect("a pool");
    let sum = |index| {
        let rows: StridedRows = memory.element(a.lists, index);
        checksum::sum(&places(&rows).map(|at| memory.bytes(pool.plus(at), 1)[0]).collect::<Vec<u8>>())
    };
    let sums: Vec<u64> = (0..a.count as usize).map(sum).collect();
    memory.write(a.sums, 0, &sums);
}
