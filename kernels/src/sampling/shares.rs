//! Shares: weights as whole numbers. Sums of whole numbers are exact, so that every order of adding gives them, on every device.

use super::exp::exp;

/// One, as a share: that of the most likely token. A token 2^40 times less likely counts as impossible; sums of 2^24 tokens fit 64 bits.
pub(crate) const ONE: u64 = 1 << 40;

/// `floor(exp((logit - best) / temperature) * 2^40)` of every logit, where `best` is the largest.
pub(crate) fn shares(logits: &[f32], best: f32, temperature: f32) -> Vec<u64> {
    // A loop of its own becomes vector instructions.
    let weights: Vec<f32> = logits.iter().map(|&logit| exp((logit - best) / temperature)).collect();
    weights.into_iter().map(share).collect()
}

/// The least share that `min_p` keeps: that of tokens at least this part as likely as the most likely one.
pub(crate) fn least_share(min_p: f32) -> u64 {
    (f64::from(min_p) * ONE as f64).ceil() as u64
}

/// What the shares of top-p and of typical tokens reach: this part of a sum, at least 1.
pub(crate) fn part(p: f32, sum: u64) -> u64 {
    ((f64::from(p) * sum as f64).ceil() as u64).max(1)
}

/// `floor(weight * 2^40)` of a weight of at most 1, by 32-bit conversions, of which processors have vectors. Every step is exact.
#[inline(always)]
fn share(weight: f32) -> u64 {
    let scaled = weight * 65_536.0;
    let high = scaled as i32;
    let low = ((scaled - high as f32) * 16_777_216.0) as i32;
    ((high as u64) << 24) | low as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_rounded_down() {
        let weights = (0..100_000).map(|i| exp(i as f32 * -0.000_31)).chain([1.0, 0.5, 1e-12, 1e-13, 1e-38, 0.0]);
        for weight in weights {
            assert_eq!(share(weight), (f64::from(weight) * ONE as f64) as u64, "{weight}");
        }
    }
}
