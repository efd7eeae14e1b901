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
}
