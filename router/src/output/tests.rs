use super::budget::RETRY_AFTER;
use super::events::lost;
use super::*;
use baton_node::intake::Hold;
use baton_node::intake::{Client, Intake};
use baton_types::ErrorKind;
use futures::StreamExt as _;
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

const MIB: u64 = 1 << 20;

fn room(intake: &Intake) -> Hold {
    intake.hold(Client::Tenant("a".into()))
}

fn delta(sample: u32, cached_tokens: Option<u32>) -> EventResult {
    Ok(Event::Delta(Delta { sample, token_ids: vec![sample], cached_tokens, ..Delta::default() }))
}

fn finished(sample: u32, total: Option<Total>) -> EventResult {
    let (reason, timings, crossed_classes) = (FinishReason::Length, PhaseTimings::default(), Vec::new());
    Ok(Event::Finished(Finished { sample, reason, stop: None, timings, crossed_classes, total }))
}

fn refused() -> EventResult {
    Err(RequestError::new(ErrorKind::Overloaded, "full"))
}

fn events(sent: Vec<EventResult>) -> Events {
    let (sender, receiver) = mpsc::channel(10);
    sent.into_iter().for_each(|event| sender.try_send(event).unwrap());
    Events::new(receiver, TaskTracker::new().token())
}

#[tokio::test]
async fn there_is_one_end_whatever_becomes_of_the_request() {
    let all = || Some(Total::default());
    for (sent, expected) in [
        (vec![delta(0, None), finished(0, all())], vec![delta(0, None), finished(0, all())]),
        (vec![finished(1, None), finished(0, all())], vec![finished(1, None), finished(0, all())]),
        (vec![delta(0, None), refused()], vec![delta(0, None), refused()]),
        (vec![finished(0, None)], vec![finished(0, None), Err(lost())]),
        (vec![delta(0, None)], vec![delta(0, None), Err(lost())]),
        (vec![], vec![Err(lost())]),
    ] {
        assert_eq!(events(sent).collect::<Vec<_>>().await, expected);
    }
}

#[tokio::test]
async fn samples_are_told_apart_and_come_in_order() {
    let total = Total { usage: Usage { completion_tokens: 3, ..Usage::default() }, cost: None };
    let sent =
        vec![delta(1, None), delta(0, None), finished(1, None), delta(0, None), finished(0, Some(total.clone()))];
    let intake = Intake::new(MIB, MIB);
    let whole = events(sent).gather(room(&intake), 0, |_| 1).await.unwrap();
    assert_eq!((&whole.total, whole.written), (&total, 3));
    let samples: Vec<_> =
        whole.samples.into_iter().map(|(delta, finished)| (finished.sample, delta.token_ids)).collect();
    assert_eq!(samples, [(0, vec![0, 0]), (1, vec![1])]);
    let failed = events(vec![delta(0, None), refused()]).gather(room(&intake), 0, |_| 1).await;
    assert_eq!(failed.unwrap_err(), refused().unwrap_err());
}

#[tokio::test]
async fn an_answer_grows_as_far_as_there_is_room() {
    let intake = Intake::new(4 * MIB, MIB);
    let of = async |before: u64, each: u64| {
        let sent = vec![delta(0, None), delta(0, None), finished(0, Some(Total::default()))];
        events(sent).gather(room(&intake), before, |_| each).await
    };
    let whole = of(100, 400 << 10).await.unwrap();
    assert_eq!((whole.written, whole.hold.bytes()), ((800 << 10) + 100, (804 << 10)));
    assert_eq!(intake.used(), whole.hold.bytes());
    // With that one there is no more room; a third of it is enough for one alone.
    for (before, each) in [(0, 300 << 10), (300 << 10, 0)] {
        let error = of(before, each).await.unwrap_err();
        assert_eq!((error.kind, error.retry_after), (ErrorKind::Overloaded, Some(RETRY_AFTER)));
        assert!(error.message.contains("ask for a stream"), "{error}");
    }
    drop(whole);
    assert_eq!(intake.used(), 0);
    of(300 << 10, 0).await.unwrap();
}

#[tokio::test]
async fn what_is_gathered_is_counted_to_the_byte() {
    let intake = Intake::new(MIB, MIB);
    // A kept token takes 8 bytes: with the serialized form of two, that is exactly one step of the budget, or one byte
    // more.
    for (each, expected) in [((4096 - 16) / 2, 4096), ((4096 - 16) / 2 + 1, 8192)] {
        let sent = vec![delta(0, None), delta(0, None), finished(0, Some(Total::default()))];
        let whole = events(sent).gather(room(&intake), 0, |_| each).await.unwrap();
        assert_eq!((whole.written, whole.hold.bytes()), (2 * each, expected));
    }
}

#[tokio::test]
async fn a_head_waits_as_long_as_there_is_room() {
    let intake = Intake::new(MIB, MIB);
    let mut other = room(&intake);
    other.set(MIB - MIB / 8).unwrap();
    let text = || Ok(Event::Delta(Delta { text: "x".repeat(20 << 10), ..Delta::default() }));
    let mut all = events(vec![text(), text(), delta(0, Some(48))]);
    let mut opening = Opening::new(Choices::of_one(1), &all, 0, room(&intake)).unwrap();
    opening.read(&mut all).await.unwrap();
    let (mut read, cached) = opening.done();
    assert_eq!((read.by_ref().count(), cached), (2, None), "it goes without what it would have waited for");
    assert_eq!(intake.used(), other.bytes() + 10 * EVENT_BYTES, "what was written takes no room");
    drop((read, all));
    assert_eq!(intake.used(), other.bytes());
}

#[tokio::test]
async fn the_head_waits_for_the_first_token_of_each_sample() {
    let intake = Intake::new(MIB, MIB);
    let mut all =
        events(vec![delta(0, Some(48)), delta(0, None), finished(0, None), delta(1, Some(32)), delta(1, None)]);
    let mut opening = Opening::new(Choices::of_one(2), &all, 0, room(&intake)).unwrap();
    opening.read(&mut all).await.unwrap();
    let (read, cached) = opening.done();
    assert_eq!((read.count(), cached), (4, Some(32)));
    let mut all = events(vec![delta(0, Some(48)), refused()]);
    let mut opening = Opening::new(Choices::of_one(2), &all, 0, room(&intake)).unwrap();
    assert!(opening.read(&mut all).await.is_err());
    let (read, cached) = opening.done();
    assert_eq!((read.count(), cached), (1, None), "what was read is not lost");
}

#[test]
fn what_a_client_may_leave_unread_has_room_or_is_refused() {
    let intake = Intake::new(MIB, MIB);
    let all = events(vec![]);
    let (opened, _) = Opening::new(Choices::of_one(1), &all, MIB / 2, room(&intake)).unwrap().done();
    assert_eq!(intake.used(), MIB / 2 + 10 * EVENT_BYTES);
    let refused = Opening::new(Choices::of_one(1), &all, MIB / 2, room(&intake)).unwrap_err();
    assert!(refused.kind == ErrorKind::Overloaded && refused.message.contains("read those"), "{refused:?}");
    drop(opened);
    assert_eq!(intake.used(), 0);
}

#[test]
fn the_prompt_of_several_samples_counts_once() {
    let usage = |completion_tokens, cached_tokens, cache_write_tokens, recomputed_tokens| Usage {
        prompt_tokens: 100,
        completion_tokens,
        cached_tokens,
        cache_write_tokens,
        recomputed_tokens,
    };
    let all = [usage(3, 32, 64, 0), usage(5, 96, 0, 7), usage(1, 96, 0, 2)];
    assert_eq!(usage_of_all(all.into_iter()), Some(usage(9, 32, 64, 9)));
    assert_eq!(usage_of_all(std::iter::empty()), None);
}

#[test]
fn a_share_is_rounded_down() {
    let cases = [(0, 0, 0), (0, 5, 0), (1, 3, 33), (2, 3, 66), (199, 200, 99), (200, 200, 100), (7, 0, 100)];
    for (cached, prompt, percent) in cases {
        assert_eq!(cache_hit_percent(cached, prompt), percent, "{cached} of {prompt}");
    }
}
