//! Tracks which parts of a handoff have received checksums. Each granule of each layer is covered exactly once.

use crate::checksum::GRANULE;
use crate::message::SumRun;
use baton_types::KvLayout;

/// One bit for each granule of each layer; it stands for all planes.
#[derive(Debug)]
pub(crate) struct Coverage {
    groups: Vec<Group>,
    bits: Vec<u64>,
}

#[derive(Debug)]
struct Group {
    /// Index of the bit of its first granule.
    first: usize,
    layers: usize,
    planes: usize,
    /// The first granule of each layer, and the number of granules.
    start: usize,
    granules: usize,
}

impl Coverage {
    /// Starts with nothing covered of the positions from `starts[group]` on, which begin at a granule.
    pub(crate) fn new(layout: &KvLayout, starts: &[u32], end: u32) -> Self {
        let mut bits = 0;
        let groups = layout.groups().iter().zip(starts).map(|(group, start)| {
            let start = (start / GRANULE) as usize;
            let granules = (end.div_ceil(GRANULE) as usize).saturating_sub(start);
            let (first, layers) = (bits, group.layers.len());
            bits += layers * granules;
            Group { first, layers, planes: group.planes.len(), start, granules }
        });
        let groups = groups.collect();
        Self { groups, bits: vec![0; bits.div_ceil(64)] }
    }

    /// Number of checksums that cover everything.
    pub(crate) fn sums(&self) -> u64 {
        self.groups.iter().map(|group| (group.layers * group.granules * group.planes) as u64).sum()
    }

    /// Adds a run. The error says why no correct source sends it.
    pub(crate) fn add(&mut self, run: &SumRun) -> Result<(), &'static str> {
        let group = self.groups.get(usize::from(run.group)).filter(|group| usize::from(run.layer) < group.layers);
        let group = group.ok_or("checksums of a layer that does not exist")?;
        let count = run.sums.len() / group.planes;
        let first = (run.first_granule as usize).checked_sub(group.start).filter(|first| {
            count > 0 && run.sums.len().is_multiple_of(group.planes) && first + count <= group.granules
        });
        let first = first.ok_or("checksums of positions that were not reserved")?;
        let start = group.first + usize::from(run.layer) * group.granules + first;
        for bit in start..start + count {
            let (word, mask) = (&mut self.bits[bit / 64], 1 << (bit % 64));
            if *word & mask != 0 {
                return Err("checksums of the same positions twice");
            }
            *word |= mask;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::Dtype;

    fn run(group: u8, layer: u16, first_granule: u32, sums: usize) -> SumRun {
        SumRun { group, layer, first_granule, sums: vec![0; sums] }
    }

    #[test]
    fn every_part_counts_once() {
        // Two layers of k and v, three granules each, the last one not full.
        let layout = KvLayout::llama(16, 2, 1, 8, Dtype::Bf16).unwrap();
        let coverage = Coverage::new(&layout, &vec![0; layout.groups().len()], 33);
        assert_eq!(coverage.sums(), 12);
        let steps = [
            (run(0, 1, 1, 4), Ok(())),
            (run(0, 1, 2, 2), Err("twice")),
            (run(0, 0, 0, 6), Ok(())),
            (run(0, 1, 0, 4), Err("twice")),
            (run(0, 1, 3, 2), Err("not reserved")),
            (run(0, 1, u32::MAX, 2), Err("not reserved")),
            (run(0, 1, 0, 3), Err("not reserved")),
            (run(0, 1, 0, 0), Err("not reserved")),
            (run(0, 2, 0, 2), Err("does not exist")),
            (run(1, 0, 0, 2), Err("does not exist")),
        ];
        check(coverage, &steps);
    }

    #[test]
    fn what_lies_before_the_start_is_no_part() {
        let layout = KvLayout::llama(16, 2, 1, 8, Dtype::Bf16).unwrap();
        let coverage = Coverage::new(&layout, &vec![32; layout.groups().len()], 65);
        assert_eq!(coverage.sums(), 12);
        let steps = [
            (run(0, 0, 0, 2), Err("not reserved")),
            (run(0, 0, 1, 2), Err("not reserved")),
            (run(0, 0, 1, 4), Err("not reserved")),
            (run(0, 1, 2, 2), Ok(())),
            (run(0, 1, 2, 2), Err("twice")),
            (run(0, 1, 3, 4), Ok(())),
            (run(0, 0, 4, 4), Err("not reserved")),
            (run(0, 0, 2, 6), Ok(())),
            (run(0, 0, 4, 2), Err("twice")),
        ];
        check(coverage, &steps);
    }

    fn check(mut coverage: Coverage, steps: &[(SumRun, Result<(), &str>)]) {
        for (run, expected) in steps {
            match (coverage.add(run), expected) {
                (Ok(()), Ok(())) => {}
                (Err(found), Err(expected)) => assert!(found.contains(expected), "{run:?}: {found}"),
                (found, _) => panic!("{run:?}: {found:?}"),
            }
        }
    }
}
