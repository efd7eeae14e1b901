//! How many proposals each sequence of a batch gets.

use super::cost::StepCost;

/// The batch must become faster by this factor: odds and costs are not exact.
const GAIN_MIN: f64 = 1.05;
/// No sequence may become slower than this part of its speed without proposals, as far as odds and costs tell.
const KEPT: f64 = 0.98;

/// `chances[i][k]` is the chance that the first `k + 1` proposals of sequence `i` are accepted; it falls with `k`. Each sequence has one
/// more row. Rows are given to the largest chances, as many as make the most tokens by time.
pub(super) fn choose(chances: &[Vec<f32>], rows_max: usize, cost: &StepCost) -> Vec<usize> {
    let sequences = chances.len();
    let none = vec![0; sequences];
    let mut candidates: Vec<(f32, usize)> =
        chances.iter().enumerate().flat_map(|(i, chances)| chances.iter().map(move |chance| (*chance, i))).collect();
    let Some(alone) = cost.seconds(sequences).filter(|_| !candidates.is_empty()) else { return none };
    // Stable: of equal chances, a sequence's earlier ones come first.
    candidates.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    let mut tokens = vec![1.0; sequences];
    let mut total = sequences as f64;
    let (mut best, mut best_rate) = (0, GAIN_MIN * total / alone);
    for (n, (chance, sequence)) in candidates.iter().enumerate().take(rows_max.saturating_sub(sequences)) {
        tokens[*sequence] += f64::from(*chance);
        total += f64::from(*chance);
        let Some(seconds) = cost.seconds(sequences + n + 1) else { break };
        let slowest = tokens.iter().copied().fold(f64::INFINITY, f64::min);
        if slowest * alone >= KEPT * seconds && total / seconds > best_rate {
            (best, best_rate) = (n + 1, total / seconds);
        }
    }
    let mut drafts = none;
    candidates[..best].iter().for_each(|(_, sequence)| drafts[*sequence] += 1);
    drafts
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Steps of `10 + row * (rows - 1)` ms.
    fn cost(row: f64) -> StepCost {
        let mut cost = StepCost::default();
        for rows in [1, 4, 8, 16].repeat(40) {
            cost.add(rows, Duration::from_secs_f64((10.0 + row * (rows as f64 - 1.0)) / 1e3));
        }
        cost
    }

    /// Chances of proposals that are each accepted with this one.
    fn chances(each: f32, n: i32) -> Vec<f32> {
        (1..=n).map(|k| each.powi(k)).collect()
    }

    #[test]
    fn rows_go_where_they_pay() {
        assert_eq!(choose(&[chances(0.95, 8)], 64, &cost(1.0)), [8]);
        assert_eq!(choose(&[chances(0.6, 8)], 64, &cost(1.0)), [3]);
        assert_eq!(choose(&[chances(0.1, 8)], 64, &cost(1.0)), [0]);
        // A row that costs nearly nothing pays at lower odds.
        assert!(choose(&[chances(0.3, 8)], 64, &cost(0.1))[0] >= 2);
        // A row that costs as much as a step never pays.
        assert_eq!(choose(&[chances(0.95, 8)], 64, &cost(10.0)), [0]);
        assert_eq!(choose(&[chances(0.95, 8)], 4, &cost(1.0)), [3], "the step has no more rows");
        assert_eq!(choose(&[], 64, &cost(1.0)), [0; 0]);
        assert_eq!(choose(&[vec![]], 64, &cost(1.0)), [0]);
        assert_eq!(choose(&[chances(0.95, 8)], 64, &StepCost::default()), [0], "nothing is measured yet");
    }

    #[test]
    fn no_sequence_pays_for_another() {
        assert_eq!(choose(&[chances(0.95, 8), vec![]], 64, &cost(1.0)), [0, 0]);
        let drafts = choose(&[chances(0.95, 8), chances(0.8, 8)], 64, &cost(1.0));
        assert!(drafts[0] >= drafts[1] && drafts[1] >= 1, "{drafts:?}");
        // Where rows cost little, others hardly notice them.
        assert!(choose(&[chances(0.95, 8), vec![]], 64, &cost(0.02))[0] >= 4);
    }
}
