//! How many proposals each sequence of a batch gets, and from where.

use super::cost::StepCost;

/// The batch must become faster by this factor: odds and costs are not exact.
const GAIN_MIN: f64 = 1.05;
/// No sequence may become slower than this part of its speed without proposals, as far as odds and costs tell.
const KEPT: f64 = 0.98;

/// Where proposals come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Proposer {
    /// The sequence's own past.
    #[default]
    Ngrams,
    /// The draft model.
    Draft,
}

/// What may be proposed for one sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Options {
    /// The chance that the first `k + 1` proposals of prompt lookup are all accepted; it falls with `k`.
    pub(crate) ngrams: Vec<f32>,
    /// `None` where the draft model cannot propose.
    pub(crate) draft: Option<DraftOption>,
}

/// What the draft model may propose for one sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct DraftOption {
    /// As [`Options::ngrams`].
    pub(crate) chances: Vec<f32>,
    /// Rows that its first proposal takes of a step of the draft model. What that has to catch up is spread over the tokens to come.
    pub(crate) rows: f64,
    /// When it proposed for the sequence last.
    pub(crate) at: u64,
}

/// The proposals that one sequence gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) proposer: Proposer,
    pub(crate) count: usize,
}

/// One of the options of a sequence.
#[derive(Clone, Copy)]
struct Offer<'a> {
    chances: &'a [f32],
    proposer: Proposer,
    draft_rows: f64,
}

impl Options {
    fn of_ngrams(&self) -> Offer<'_> {
        Offer { chances: &self.ngrams, proposer: Proposer::Ngrams, draft_rows: 0.0 }
    }

    /// What is expected to make more tokens; prompt lookup, which takes no time, where it makes as many.
    fn likelier(&self) -> Offer<'_> {
        let tokens = |chances: &[f32]| chances.iter().sum::<f32>();
        match &self.draft {
            Some(DraftOption { chances, rows, .. }) if tokens(chances) > tokens(&self.ngrams) => {
                Offer { chances, proposer: Proposer::Draft, draft_rows: *rows }
            }
            _ => self.of_ngrams(),
        }
    }
}

/// The costs of a step: of the model, and of the draft model before it.
#[derive(Clone, Copy)]
pub(super) struct Costs<'a> {
    pub(super) model: &'a StepCost,
    pub(super) draft: &'a StepCost,
}

impl Costs<'_> {
    /// Seconds of steps of the draft model with so many rows each. Before any was measured, one is tried as if it took none.
    fn of_drafts(&self, rows: &[f64]) -> f64 {
        rows.iter().filter_map(|rows| self.draft.seconds_of(*rows)).sum()
    }
}

/// Who gets rows first.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Whoever has the largest chance.
    Chance,
    /// Each sequence one after another. Else one that is always right takes all rows, and the others, which would be slowed, forbid it.
    Turns,
}

/// The proposals of each sequence. Each has one more row. A sequence has proposals of one kind; those of the draft model are left out where
/// the batch is faster without the time that they take.
pub(super) fn choose(options: &[Options], rows_max: usize, costs: Costs<'_>) -> Vec<Share> {
    let ngrams: Vec<_> = options.iter().map(Options::of_ngrams).collect();
    let likelier: Vec<_> = options.iter().map(Options::likelier).collect();
    let mut chosen = spend(&ngrams, Order::Chance, rows_max, costs);
    if likelier.iter().any(|offer| offer.proposer == Proposer::Draft) {
        for order in [Order::Chance, Order::Turns] {
            let with_draft = spend(&likelier, order, rows_max, costs);
            if with_draft.rate > chosen.rate {
                chosen = with_draft;
            }
        }
    }
    chosen.shares
}

/// Proposals of a batch.
struct Spent {
    shares: Vec<Share>,
    /// Tokens by second; without any proposal, those that proposals must surpass.
    rate: f64,
}

/// Gives rows to proposals in this order, as many as make the most tokens by time.
fn spend(offers: &[Offer<'_>], order: Order, rows_max: usize, costs: Costs<'_>) -> Spent {
    let sequences = offers.len();
    let mut shares: Vec<_> = offers.iter().map(|offer| Share { proposer: offer.proposer, count: 0 }).collect();
    let candidates = offers
        .iter()
        .enumerate()
        .flat_map(|(i, offer)| offer.chances.iter().enumerate().map(move |(depth, chance)| (depth, *chance, i)));
    let mut candidates: Vec<(usize, f32, usize)> = candidates.collect();
    let Some(alone) = costs.model.seconds(sequences).filter(|_| !candidates.is_empty()) else {
        return Spent { shares, rate: 0.0 };
    };
    // Stable: of equal chances, a sequence's earlier ones come first.
    candidates.sort_by(|(depth_a, a, _), (depth_b, b, _)| match order {
        Order::Chance => b.total_cmp(a),
        Order::Turns => depth_a.cmp(depth_b).then(b.total_cmp(a)),
    });
    let mut tokens = vec![1.0; sequences];
    let mut total = sequences as f64;
    // Of each step of the draft model.
    let mut draft_rows = Vec::new();
    let (mut best, mut best_rate) = (0, GAIN_MIN * total / alone);
    for (n, &(depth, chance, sequence)) in candidates.iter().enumerate().take(rows_max.saturating_sub(sequences)) {
        tokens[sequence] += f64::from(chance);
        total += f64::from(chance);
        if offers[sequence].proposer == Proposer::Draft {
            if draft_rows.len() == depth {
                draft_rows.push(0.0);
            }
            draft_rows[depth] += if depth == 0 { offers[sequence].draft_rows } else { 1.0 };
        }
        let Some(seconds) = costs.model.seconds(sequences + n + 1) else { break };
        let seconds = seconds + costs.of_drafts(&draft_rows);
        let slowest = tokens.iter().copied().fold(f64::INFINITY, f64::min);
        if slowest * alone >= KEPT * seconds && total / seconds > best_rate {
            (best, best_rate) = (n + 1, total / seconds);
        }
    }
    candidates[..best].iter().for_each(|(.., sequence)| shares[*sequence].count += 1);
    Spent { shares, rate: best_rate }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Steps of `first + row * (rows - 1)` ms.
    fn steps(first: f64, row: f64) -> StepCost {
        let mut cost = StepCost::default();
        for rows in [1, 4, 8, 16].repeat(40) {
            cost.add(rows, Duration::from_secs_f64((first + row * (rows as f64 - 1.0)) / 1e3));
        }
        cost
    }

    fn cost(row: f64) -> StepCost {
        steps(10.0, row)
    }

    /// Chances of proposals that are each accepted with this one.
    fn chances(each: f32, n: i32) -> Vec<f32> {
        (1..=n).map(|k| each.powi(k)).collect()
    }

    /// What prompt lookup gets.
    fn choose(ngrams: &[Vec<f32>], rows_max: usize, cost: &StepCost) -> Vec<usize> {
        let options: Vec<_> = ngrams.iter().map(|ngrams| Options { ngrams: ngrams.clone(), draft: None }).collect();
        let costs = Costs { model: cost, draft: &StepCost::default() };
        super::choose(&options, rows_max, costs).iter().map(|share| share.count).collect()
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

    /// A sequence for which the draft model proposes with this chance each, and prompt lookup with that.
    fn drafted(draft: f32, ngrams: f32) -> Options {
        let draft = DraftOption { chances: chances(draft, 8), rows: 1.0, at: 0 };
        Options { ngrams: chances(ngrams, 8), draft: Some(draft) }
    }

    fn counts(options: &[Options], draft: &StepCost) -> Vec<(Proposer, usize)> {
        let costs = Costs { model: &cost(0.5), draft };
        super::choose(options, 64, costs).iter().map(|share| (share.proposer, share.count)).collect()
    }

    #[test]
    fn the_time_of_the_draft_model_counts() {
        let count = |each, first| counts(&[drafted(each, 0.1)], &steps(first, 0.1))[0];
        let (free, cheap, dear) = (count(0.8, 0.01), count(0.8, 1.0), count(0.8, 9.0));
        assert!(free.0 == Proposer::Draft && cheap.0 == Proposer::Draft, "{free:?}, {cheap:?}");
        assert!(free.1 > cheap.1 && cheap.1 >= 2, "{free:?}, {cheap:?}");
        assert_eq!(dear.1, 0, "a draft model as slow as the model is a loss");
        assert_eq!(count(0.15, 1.0).1, 0, "and so is one that is mostly wrong");
        assert_eq!(
            counts(&[drafted(0.8, 0.1)], &StepCost::default())[0].0,
            Proposer::Draft,
            "it is tried to be measured"
        );
        // A prompt that it would have to read for the next few tokens.
        let mut behind = drafted(0.8, 0.1);
        behind.draft.as_mut().unwrap().rows = 200.0;
        assert_eq!(counts(&[behind], &steps(1.0, 0.1))[0].1, 0);
    }

    #[test]
    fn one_step_of_the_draft_model_is_for_the_whole_batch() {
        // A proposal for one of them would make the others wait.
        let shared = counts(&vec![drafted(0.6, 0.1); 8], &steps(1.0, 0.01));
        assert!(shared.iter().all(|share| share.0 == Proposer::Draft && share.1 >= 1), "{shared:?}");
        let mut with_another = vec![drafted(0.6, 0.1); 7];
        with_another.push(Options::default());
        assert!(counts(&with_another, &steps(1.0, 0.01)).iter().all(|share| share.1 == 0));
    }

    #[test]
    fn one_that_is_always_right_leaves_rows_to_others() {
        let options = [drafted(0.99, 0.1), drafted(0.9, 0.1)];
        let costs = Costs { model: &cost(0.5), draft: &steps(0.5, 0.01) };
        let shares = super::choose(&options, 8, costs);
        assert!(shares.iter().all(|share| share.count >= 2), "{shares:?}");
    }

    #[test]
    fn each_sequence_has_the_kind_that_is_likelier() {
        let options = [drafted(0.6, 0.95), drafted(0.8, 0.3), drafted(0.7, 0.7)];
        let shares = counts(&options, &steps(0.5, 0.05));
        assert_eq!(
            shares.iter().map(|share| share.0).collect::<Vec<_>>(),
            [Proposer::Ngrams, Proposer::Draft, Proposer::Ngrams]
        );
        assert!(shares.iter().all(|share| share.1 > 0), "{shares:?}");
        // Where the draft model is too slow, prompt lookup has what it would have alone.
        let shares = counts(&[drafted(0.9, 0.8)], &steps(9.0, 0.1));
        assert!(shares[0].0 == Proposer::Ngrams && shares[0].1 > 2, "{shares:?}");
    }
}
