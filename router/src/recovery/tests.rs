use super::*;
use ErrorKind::*;
use Step::*;
use baton_types::{Party, Role};

const LIMITS: RetryLimits = RetryLimits {
    attempts_max: 3,
    backoff_min: Duration::from_millis(20),
    backoff_max: Duration::from_millis(100),
    place_max: Duration::from_secs(2),
    ready_max: Duration::from_millis(100),
    adopted_max: Duration::from_millis(100),
};

fn failure(step: Step, kind: ErrorKind, started: bool) -> Failure {
    Failure { step, kind, retry_after: None, started, drained: false }
}

fn shown(result: Result<Retry, GiveUp>) -> String {
    let letter = |how: Option<Avoid>| match how {
        None => '-',
        Some(Avoid::Softly) => 's',
        Some(Avoid::Strictly) => 'S',
    };
    match result {
        Err(why) => why.name().to_owned(),
        Ok(Retry { after, prefill, decode, probation, .. }) => {
            let probation = if probation { " probation" } else { "" };
            format!("p{} d{} {}ms{probation}", letter(prefill), letter(decode), after.as_millis())
        }
    }
}

/// The first failure of a request with a minute left and a full bucket.
fn first(failure: Failure) -> String {
    let now = Instant::now();
    let minute = now + Duration::from_secs(60);
    shown(Recovery::new(LIMITS).after(&failure, now, minute, &RetryBucket::new(10, 0.0), 1.0))
}

/// One retry is left; a request without time for it leaves it to others.
#[test]
fn a_retry_that_is_not_made_is_not_paid_for() {
    let (now, bucket) = (Instant::now(), RetryBucket::new(1, 0.0));
    let failed = failure(Decode, Unavailable, true);
    for _ in 0..3 {
        let late = Recovery::new(LIMITS).after(&failed, now, now + LIMITS.backoff_min / 2, &bucket, 1.0);
        assert_eq!(shown(late), "deadline");
        let futile = Recovery::new(LIMITS).after(&failure(Decode, Unsupported, true), now, now, &bucket, 1.0);
        assert_eq!(shown(futile), "futile");
    }
    let minute = now + Duration::from_secs(60);
    assert!(Recovery::new(LIMITS).after(&failed, now, minute, &bucket, 1.0).is_ok());
    assert_eq!(shown(Recovery::new(LIMITS).after(&failed, now, minute, &bucket, 1.0)), "budget");
}

#[test]
fn what_failed_decides_whom_to_avoid() {
    // step, kind, tokens were sent; p: prefill worker, d: decode worker, s: avoided softly, S: strictly, until tokens
    // were sent
    let cases = [
        (Place, Unavailable, false, "p- d- 20ms"),
        (Place, Overloaded, false, "futile"),
        (Place, Unavailable, true, "p- d- 20ms"),
        (Place, Overloaded, true, "p- d- 20ms"),
        (Place, ContextLengthExceeded, false, "futile"),
        (Place, ContextLengthExceeded, true, "p- d- 20ms"),
        (Place, InvalidRequest, false, "futile"),
        (Place, InvalidRequest, true, "p- d- 20ms"),
        (Claim, Unavailable, false, "p- ds 20ms probation"),
        (Claim, Overloaded, false, "p- dS 20ms"),
        (Claim, Overloaded, true, "p- dS 20ms"),
        (Claim, ContextLengthExceeded, false, "futile"),
        (Claim, ContextLengthExceeded, true, "futile"),
        (Claim, InvalidRequest, true, "futile"),
        (Prefill, Unavailable, false, "ps d- 20ms probation"),
        (Prefill, Unavailable, true, "ps d- 20ms probation"),
        (Prefill, Overloaded, false, "pS d- 20ms"),
        (Prefill, Internal, true, "ps d- 20ms probation"),
        (Prefill, DeadlineExceeded, false, "futile"),
        (Handoff, Unavailable, true, "ps ds 20ms"),
        (Handoff, Internal, false, "ps ds 20ms"),
        (Handoff, Overloaded, false, "pS ds 20ms"),
        (Handoff, Cancelled, false, "ps ds 20ms"),
        (Handoff, DeadlineExceeded, true, "ps ds 20ms"),
        (Decode, Unavailable, true, "p- ds 20ms probation"),
        (Decode, Cancelled, true, "p- ds 20ms probation"),
        (Decode, Internal, true, "p- ds 20ms probation"),
        (Decode, Unsupported, true, "futile"),
        (Decode, ModelNotFound, false, "futile"),
    ];
    for (step, kind, started, expected) in cases {
        assert_eq!(first(failure(step, kind, started)), expected, "{step:?} {kind:?} {started}");
    }
}

/// All failures of one request: (ms since its start, failure), and the decision after each. `deadline` in ms.
fn check(deadline: u64, burst: u32, jitter: f64, failures: &[(u64, Failure)], expected: &[&str]) {
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let (mut recovery, bucket) = (Recovery::new(LIMITS), RetryBucket::new(burst, 0.0));
    let got: Vec<String> =
        failures.iter().map(|(ms, f)| shown(recovery.after(f, at(*ms), at(deadline), &bucket, jitter))).collect();
    assert_eq!(got, expected);
}

#[test]
fn attempts_are_bounded_and_back_off() {
    let died = failure(Decode, Unavailable, true);
    let (s20, s40) = ("p- ds 20ms probation", "p- ds 40ms probation");
    check(60_000, 10, 1.0, &[(0, died), (10, died), (20, died)], &[s20, s40, "attempts"]);
    check(60_000, 10, 0.0, &[(0, died), (10, died)], &["p- ds 10ms probation", "p- ds 20ms probation"]);
    check(60_000, 1, 1.0, &[(0, died), (10, died)], &[s20, "budget"]);
    check(20, 10, 1.0, &[(0, died)], &["deadline"]);
    check(21, 10, 1.0, &[(0, died)], &[s20]);
    // A request that breaks workers must not be tried on all of them.
    let broken = failure(Decode, Internal, true);
    check(60_000, 10, 1.0, &[(0, broken), (10, broken)], &[s20, "futile"]);
}

#[test]
fn a_started_answer_waits_for_a_worker_and_pays_nothing_for_it() {
    let (nobody, died) = (failure(Place, Unavailable, true), failure(Decode, Unavailable, true));
    let waits = [(0, died), (20, nobody), (40, nobody), (80, nobody), (160, nobody), (300, nobody), (2_020, nobody)];
    let steps = ["p- d- 20ms", "p- d- 40ms", "p- d- 80ms", "p- d- 100ms", "p- d- 100ms", "no_worker"];
    check(60_000, 1, 1.0, &waits, &[&["p- ds 20ms probation"], &steps[..]].concat());
    let full = Failure { retry_after: Some(Duration::from_millis(90)), ..failure(Place, Overloaded, true) };
    let after_died = "p- ds 40ms probation";
    check(60_000, 2, 1.0, &[(0, died), (1, full), (99, died)], &["p- ds 20ms probation", "p- d- 90ms", after_died]);
    let full_for_long = Failure { retry_after: Some(Duration::from_secs(3)), ..full };
    assert_eq!(first(full_for_long), "p- d- 100ms", "no longer than any other wait");
}

#[test]
fn a_new_request_waits_a_moment_for_a_worker_to_be_ready() {
    let nobody = failure(Place, Unavailable, false);
    check(60_000, 1, 1.0, &[(0, nobody), (20, nobody), (100, nobody)], &["p- d- 20ms", "p- d- 40ms", "no_worker"]);
}

#[test]
fn workers_that_drain_cost_a_request_nothing() {
    let (died, cut_off) =
        (failure(Decode, Unavailable, true), Failure { drained: true, ..failure(Decode, Unavailable, true) });
    let drains = [(0, cut_off), (10, cut_off), (20, cut_off), (30, cut_off), (40, died), (50, died)];
    let went_on = ["p- ds 20ms"; 4];
    check(60_000, 1, 1.0, &drains, &[&went_on[..], &["p- ds 20ms probation", "budget"]].concat());
    assert_eq!(first(Failure { drained: true, ..failure(Claim, InvalidRequest, false) }), "futile");
}

#[test]
fn the_wait_for_a_worker_begins_anew_once_one_was_asked() {
    let nobody = failure(Place, Unavailable, false);
    let asked = [failure(Claim, Unavailable, false), Failure { drained: true, ..failure(Claim, Unavailable, false) }];
    for (asked, decision) in asked.into_iter().zip(["p- ds 20ms probation", "p- ds 20ms"]) {
        // 150 ms after the first placement, which is more than `ready_max`; 50 ms after the second.
        let failures = [(0, nobody), (20, asked), (100, nobody), (150, nobody)];
        check(60_000, 1, 1.0, &failures, &["p- d- 20ms", decision, "p- d- 20ms", "p- d- 40ms"]);
    }
}

#[test]
fn who_was_full_is_asked_again_once_the_answer_has_begun() {
    let record = crate::testing::record(Role::Decode, "full");
    let full = &record.party;
    let other = crate::testing::record(Role::Decode, "other").party;
    let failed = |avoided: &mut Avoided, decode: &Party, failure: Failure| {
        let now = Instant::now();
        let deadline = now + Duration::from_secs(60);
        let retry = Recovery::new(LIMITS).after(&failure, now, deadline, &RetryBucket::new(1, 0.0), 1.0);
        avoided.failed(None, decode, &retry.unwrap());
    };
    // Retry scopes that include it, and whether it may be what is missing.
    let asked = |avoided: &Avoided| {
        let sets = CandidateSet::WIDENING.into_iter().filter(|set| avoided.admits(full, Role::Decode, false, *set));
        (sets.collect::<Vec<_>>(), avoided.excludes_missing(Some(Role::Decode), [&record]))
    };
    let mut avoided = Avoided::default();
    assert_eq!(asked(&avoided), (CandidateSet::WIDENING.to_vec(), false));
    failed(&mut avoided, full, failure(Claim, Overloaded, false));
    failed(&mut avoided, &other, failure(Claim, Unavailable, false));
    assert_eq!(asked(&avoided), (vec![], true));
    assert!(!avoided.excludes_missing(Some(Role::Prefill), [&record]) && !avoided.excludes_missing(None, [&record]));
    failed(&mut avoided, &other, failure(Decode, Unavailable, true));
    let again = vec![CandidateSet::DecodersAgain, CandidateSet::OtherPairs, CandidateSet::All];
    assert_eq!(asked(&avoided), (again.clone(), false));
    failed(&mut avoided, full, failure(Claim, Overloaded, true));
    assert_eq!(asked(&avoided), (again, false));
}
