//! The order in which tenants are served; letters name the tenants.

use super::*;
use baton_types::Weight;
use proptest::prelude::*;

fn share(tenant: char, weight: u32) -> Share {
    Share { tenant: TenantLabel(u64::from(tenant)), weight: Weight::try_new(weight).unwrap() }
}

/// Serves all waiting requests, one after the other; returns their order.
fn serves(order: &mut FairOrder, mut waiting: Vec<(Start, usize, char)>) -> String {
    waiting.sort_unstable();
    waiting
        .into_iter()
        .map(|(start, _, name)| {
            order.served(0, start);
            name
        })
        .collect()
}

/// Weight of the tenant with this letter.
type WeightOf = fn(char) -> u32;

/// Enters a request of `tokens` for each letter.
fn enters(order: &mut FairOrder, asks: &str, tokens: usize, weight: WeightOf) -> Vec<(Start, usize, char)> {
    let enter = |(n, name)| (order.enter(0, share(name, weight(name)), tokens, None).start, n, name);
    asks.chars().enumerate().map(enter).collect()
}

#[test]
fn tenants_are_served_by_weight_and_each_as_it_came() {
    let cases: [(&str, WeightOf, &str); 4] = [
        ("aaaa", |_| 1, "aaaa"),
        ("aaaabbb", |_| 1, "abababa"),
        ("aaaaaabbbbbb", |name| if name == 'b' { 2 } else { 1 }, "abbabbabbaaa"),
        ("aaaaaac", |_| 1000, "acaaaaa"),
    ];
    for (asks, weight, expected) in cases {
        let mut order = FairOrder::default();
        let waiting = enters(&mut order, asks, 100, weight);
        assert_eq!(serves(&mut order, waiting), expected, "{asks}");
    }
}

#[test]
fn who_comes_late_is_due_nothing_of_before() {
    let mut order = FairOrder::default();
    let waiting = enters(&mut order, "aaaaaaaa", 100, |_| 1);
    let (served, queued) = waiting.split_at(6);
    serves(&mut order, served.to_vec());
    // It comes before the waiting requests, but not with six requests in a row.
    let mut waiting = enters(&mut order, "bbbbbb", 100, |_| 1);
    waiting.extend(queued);
    assert_eq!(serves(&mut order, waiting), "bbababbb");
}

#[test]
fn a_long_request_counts_as_many_short_ones() {
    let mut order = FairOrder::default();
    let long = order.enter(0, share('a', 1), 300, None).start;
    let mut waiting = enters(&mut order, "abbbb", 100, |_| 1);
    waiting.push((long, 9, 'A'));
    assert_eq!(serves(&mut order, waiting), "bAbbab");
}

#[test]
fn priorities_have_times_of_their_own() {
    let mut order = FairOrder::default();
    for _ in 0..9 {
        let urgent = order.enter(5, share('x', 1), 1000, None).start;
        order.served(5, urgent);
    }
    let waiting = enters(&mut order, "aab", 100, |_| 1);
    assert_eq!(serves(&mut order, waiting), "aba");
    assert_eq!(order.enter(i32::MAX, share('a', 1), 1, None), order.enter(7, share('a', 1), 1, None));
    assert_eq!(order.levels.len(), 4, "all beyond the last are one");
}

#[test]
fn siblings_have_one_turn_and_are_charged_once() {
    let mut order = FairOrder::default();
    let prompt = Some(PrefixHash([1; 16]));
    let a = share('a', 1);
    let first = order.enter(0, a, 100, prompt);
    let b = order.enter(0, share('b', 1), 100, None).start;
    let second = order.enter(0, a, 100, prompt);
    assert_eq!((first.start, first.tokens, second.tokens), (second.start, 100, 1));
    let next = order.enter(0, a, 100, Some(PrefixHash([2; 16]))).start;
    assert_eq!(next, first.start.after(101, a));
    // A request that comes after virtual time advanced starts at once.
    order.served(0, b);
    order.served(0, next);
    assert_eq!(order.enter(0, a, 100, Some(PrefixHash([2; 16]))).start, next);
    let other = order.enter(0, share('b', 1), 100, Some(PrefixHash([2; 16])));
    assert_eq!(other.tokens, 100, "of another tenant");
}

#[test]
fn what_is_given_back_counts_no_more_and_nobody_overtakes_itself() {
    let mut order = FairOrder::default();
    let a = share('a', 2);
    let starts: Vec<_> = (0..3).map(|_| order.enter(0, a, 100, None).start).collect();
    order.give_back(0, a, 200);
    // Two are refunded: the next comes right after the third, whose own tokens no longer count either.
    assert_eq!(order.enter(0, a, 100, None).start, starts[2]);
    order.give_back(0, share('z', 1), 100);
    order.give_back(0, a, usize::MAX);
    assert_eq!(order.enter(0, a, 100, None).start, starts[2]);
}

#[test]
fn time_does_not_go_back_where_an_earlier_request_is_served_later() {
    let mut order = FairOrder::default();
    let starts: Vec<_> = (0..2).map(|_| order.enter(0, share('a', 1), 100, None).start).collect();
    assert!(starts[0] < starts[1]);
    // The first one lacked blocks.
    order.served(0, starts[1]);
    order.served(0, starts[0]);
    assert_eq!(order.enter(0, share('b', 1), 100, None).start, starts[1], "who comes late is due nothing of before");
}

#[test]
fn whom_time_has_reached_is_forgotten() {
    let mut order = FairOrder::default();
    let waiting = enters(&mut order, "abc", 100, |_| 1);
    assert_eq!(order.tenants(), 3);
    serves(&mut order, waiting);
    let next = order.enter(0, share('a', 1), 100, None).start;
    order.served(0, next);
    assert_eq!(order.tenants(), 1, "all but the one that was served last");
    for n in 0..2 * TENANTS_MAX as u64 {
        order.enter(0, Share { tenant: TenantLabel(n), ..Share::default() }, 1 + n as usize, None);
        assert!(order.tenants() <= TENANTS_MAX);
    }
}

#[test]
fn tokens_are_divided_by_weight_and_none_is_left_over() {
    let divide = |tokens, wishes: &[(char, u32, usize)]| {
        let wish = |&(name, weight, tokens)| Wish { share: share(name, weight), tokens };
        FairOrder::default().divide(0, &wishes.iter().map(wish).collect::<Vec<_>>(), tokens)
    };
    assert_eq!(divide(64, &[('a', 1, 999), ('b', 1, 999)]), [32, 32]);
    assert_eq!(divide(64, &[('a', 1, 999), ('b', 3, 999)]), [16, 48]);
    assert_eq!(divide(64, &[('a', 1, 999), ('b', 1, 10)]), [54, 10]);
    assert_eq!(divide(64, &[('a', 1, 10), ('b', 1, 10)]), [10, 10]);
    assert_eq!(divide(0, &[('a', 1, 10)]), [0]);
    assert_eq!(divide(9, &[]), [0; 0]);
    assert_eq!(divide(8192, &[('a', 1, 8192), ('b', 1, 8192)]), [4096, 4096]);
}

#[test]
fn a_single_row_goes_round() {
    let mut order = FairOrder::default();
    let wishes = [('a', 1), ('b', 2)].map(|(name, weight)| Wish { share: share(name, weight), tokens: 99 });
    let mut rows = [0, 0];
    for _ in 0..30 {
        let gets = order.divide(0, &wishes, 1);
        rows = [rows[0] + gets[0], rows[1] + gets[1]];
    }
    assert_eq!(rows, [10, 20]);
    // A tenant that was away gets no compensation for that.
    let wishes = [('a', 1), ('c', 1)].map(|(name, weight)| Wish { share: share(name, weight), tokens: 99 });
    let gets: Vec<_> = (0..4).map(|_| order.divide(0, &wishes, 1)[1]).collect();
    assert!(gets.iter().sum::<usize>() <= 3, "{gets:?}");
}

#[test]
fn a_full_queue_takes_whom_it_has_little_of() {
    let (a, b) = (share('a', 1), share('b', 3));
    let cases = [
        (vec![(a, 8)], a, 1, false),
        (vec![], a, 1, false),
        (vec![(a, 8)], b, 7, true),
        (vec![(a, 8), (b, 5)], b, 1, true),
        (vec![(a, 8), (b, 6)], b, 1, false),
        (vec![(a, 1), (b, 7)], a, 1, true),
        (vec![(a, 2), (b, 6)], a, 1, false),
        (vec![(a, 0), (b, 8)], b, 1, false),
    ];
    for (have, of, more, expected) in cases {
        assert_eq!(is_within(have.clone(), of, more, 8), expected, "{have:?}, {of:?}");
    }
}

proptest! {
    /// While two tenants have requests waiting, their service by weight differs by at most their longest requests.
    #[test]
    fn nobody_with_something_waiting_falls_behind(
        weights in (1u32..9, 1u32..9), lens in proptest::collection::vec((1usize..200, any::<bool>()), 2..60),
    ) {
        let (a, b) = (share('a', weights.0), share('b', weights.1));
        let mut order = FairOrder::default();
        let mut waiting: Vec<_> = lens.iter().enumerate().map(|(n, &(len, is_a))| {
            let share = if is_a { a } else { b };
            (order.enter(0, share, len, None).start, n, is_a, len)
        }).collect();
        waiting.sort_unstable();
        let longest = |of: bool| lens.iter().filter(|(_, is_a)| *is_a == of).map(|(len, _)| *len).max().unwrap_or(0) as f64;
        let bound = longest(true) / f64::from(weights.0) + longest(false) / f64::from(weights.1) + 0.01;
        let (mut served, mut left) = ([0.0; 2], [false, true].map(|of| lens.iter().filter(|(_, is_a)| *is_a == of).count()));
        for (start, _, is_a, len) in waiting {
            if left.contains(&0) {
                break;
            }
            order.served(0, start);
            served[usize::from(is_a)] += len as f64 / f64::from(if is_a { weights.0 } else { weights.1 });
            left[usize::from(is_a)] -= 1;
            prop_assert!((served[0] - served[1]).abs() <= bound, "{served:?}, {bound}");
        }
    }
}
