//! The eight-lane sum: a reduction order that any vector unit of up to eight lanes can implement.

/// Number of lanes of every long reduction.
pub const LANES: usize = 8;

/// Merges lanes as `((0+4)+(2+6)) + ((1+5)+(3+7))`: halves, quarters, pairs.
#[inline(always)]
pub fn merge(lane: [f32; LANES]) -> f32 {
    let [a, b, c, d, e, f, g, h] = lane;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// Lane dot product; the shorter tail is padded with `+0`.
///
/// # Panics
/// If the lengths differ.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let mut lane = [0.0; LANES];
    for start in (0..a.len()).step_by(LANES) {
        for (l, acc) in lane.iter_mut().enumerate() {
            let at = |v: &[f32]| v.get(start + l).copied().unwrap_or(0.0);
            *acc = at(a).mul_add(at(b), *acc);
        }
    }
    merge(lane)
}

/// Lane sum; the tail is padded with `+0`.
#[inline(always)]
pub fn sum(a: &[f32]) -> f32 {
    let mut lane = [0.0; LANES];
    for chunk in a.chunks(LANES) {
        for (l, acc) in lane.iter_mut().enumerate() {
            *acc += chunk.get(l).copied().unwrap_or(0.0);
        }
    }
    merge(lane)
}

/// Lanes of the long sums of the tensor-core classes.
pub const WIDE_LANES: usize = 512;

/// Lanes of a [`wide_dot`] that are merged first.
const WARP: usize = 32;

/// Dot product in [`WIDE_LANES`] lanes, each by FMA from `+0`; tails are padded with `+0`. Each run of 32 lanes is merged by halves, then the
/// results of the runs likewise.
///
/// # Panics
/// If the lengths differ.
pub fn wide_dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let mut lane = [0.0f32; WIDE_LANES];
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        lane[i % WIDE_LANES] = a.mul_add(*b, lane[i % WIDE_LANES]);
    }
    let mut runs: Vec<f32> = lane.chunks_exact(WARP).map(|run| halved(&mut run.to_vec())).collect();
    halved(&mut runs)
}

/// The sum of a power of two of values: `i` and `i + len / 2`, until one is left.
fn halved(values: &mut [f32]) -> f32 {
    let mut len = values.len();
    while len > 1 {
        len /= 2;
        let (low, high) = values.split_at_mut(len);
        low.iter_mut().zip(high).for_each(|(a, b)| *a += *b);
    }
    values[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_the_written_one() {
        // 2^24 absorbs a 1 unless the ones are added to each other first: each expectation holds for the canonical tree only.
        let big = 16_777_216.0f32;
        for (lanes, want) in [
            ([big, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0], big + 2.0), // 1 and 3 are added before 0
            ([big, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0], big + 2.0), // 2 and 6 are added before 0
            ([big, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0], big),       // 4, 2 and 1 are added to 0 one by one
        ] {
            assert_eq!(merge(lanes), want);
        }
    }

    #[test]
    fn tails_count() {
        let v: Vec<f32> = (1..=11).map(|i| i as f32).collect();
        assert_eq!(sum(&v), 66.0);
        assert_eq!(dot(&v, &v), 506.0);
    }

    #[test]
    fn wide_order_is_the_written_one() {
        // As above: 1 is lost beside the largest value, unless it is added to another 1 first.
        let big = 16_777_216.0f32;
        for (ones, want) in [
            ([1, 17], big + 2.0),   // within a run, by halves of 32
            ([33, 65], big),        // run 2 is added to run 0 before run 1 is
            ([33, 97], big + 2.0),  // runs 1 and 3 are added to each other first
            ([32, 288], big + 2.0), // runs 1 and 9 likewise
            ([1, 513], big + 2.0),  // ascending within a lane
            ([512, 1024], big),     // one by one within lane 0
        ] {
            let mut x = vec![0.0; 1100];
            x[0] = big;
            ones.iter().for_each(|&i| x[i] = 1.0);
            assert_eq!(wide_dot(&x, &vec![1.0; 1100]), want, "{ones:?}");
        }
    }
}
