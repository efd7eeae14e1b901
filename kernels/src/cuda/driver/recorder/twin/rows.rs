//! Copies and checksums of pool memory.

use crate::cuda::arguments::pool::{CopyRows, SumRows};
use crate::cuda::driver::recorder::memory::Memory;
use baton_memory::checksum;

pub(super) fn copy(a: &CopyRows, memory: &mut Memory) {
    let (from, to) = (a.from.address().expect("a source"), a.to.address().expect("a destination"));
    let copies = a.copies.address().expect("copies");
    for copy in memory.at::<u64>(copies, 6 * a.count as usize).chunks_exact(6) {
        let [source, from_stride, target, to_stride, row_bytes, rows] = *copy else { unreachable!("six") };
        for row in 0..rows {
            let bytes = memory.bytes(from.plus((source + row * from_stride) as usize), row_bytes as usize).to_vec();
            memory.bytes_mut(to.plus((target + row * to_stride) as usize), row_bytes as usize).copy_from_slice(&bytes);
        }
    }
}

pub(super) fn sum(a: &SumRows, memory: &mut Memory) {
    let pool = a.pool.address().expect("a pool");
    let lists = a.lists.address().expect("lists");
    let sums = memory.at::<u64>(lists, 4 * a.count as usize);
    let sums: Vec<u64> = sums
        .chunks_exact(4)
        .map(|list| {
            let [start, row_bytes, stride, rows] = *list else { unreachable!("four") };
            let row = |row| memory.bytes(pool.plus((start + row * stride) as usize), row_bytes as usize);
            checksum::sum(&(0..rows).flat_map(row).copied().collect::<Vec<u8>>())
        })
        .collect();
    memory.write(a.sums, 0, &sums);
}
