//! Locally typical tokens (Meister et al., arXiv:2202.00666): those whose information is near the entropy.
//!
//! The information of a token is `-ln p`, and the entropy is its mean. With the exponent `x = (logit - best) / temperature` it is
//! `ln(sum(exp(x))) - x`, and the logarithm is the same for all tokens. So the distance of a token's information from the entropy is the
//! distance of its `x` from the mean of `x` under `p`, and no logarithm is computed. Depths, `-x`, are whole numbers of 2^-20, and their mean
//! is of whole numbers, so that it is the same in every order of adding.

/// Units of a depth.
const UNITS: f32 = 1_048_576.0;

/// How far a logit is below the best one: `floor((best - logit) / temperature * 2^20)`. A token with a share is less than 28 below.
#[inline(always)]
pub(crate) fn depth(logit: f32, best: f32, temperature: f32) -> u32 {
    (-((logit - best) / temperature) * UNITS) as u32
}

/// The mean of depths, rounded down, from their sum, each times its share, and the sum of the shares.
pub(crate) fn mean(weighted: u128, sum: u64) -> u32 {
    (weighted / u128::from(sum.max(1))) as u32
}

/// Removes from `shares` what is not typical: keeps the tokens at the smallest distances from the mean whose shares together reach `typical_p`
/// of the sum, and others at the last of these distances. Tokens without a share count for nothing.
pub(super) fn keep(typical_p: f32, depths: impl Fn(usize) -> u32, shares: &mut [u64]) {
    let members: Vec<usize> = (0..shares.len()).filter(|&token| shares[token] > 0).collect();
    let sum = members.iter().map(|&token| shares[token]).sum();
    let weighted = members.iter().map(|&token| u128::from(shares[token]) * u128::from(depths(token))).sum();
    let mean = mean(weighted, sum);
    let mut nearest: Vec<(u32, usize)> = members.iter().map(|&token| (depths(token).abs_diff(mean), token)).collect();
    nearest.sort_unstable();
    let (enough, mut reached) = (super::shares::part(typical_p, sum), 0);
    let last = nearest.iter().find(|(_, token)| {
        reached += shares[*token];
        reached >= enough
    });
    let farthest = last.map_or(u32::MAX, |(distance, _)| *distance);
    nearest.iter().filter(|(distance, _)| *distance > farthest).for_each(|(_, token)| shares[*token] = 0);
}
