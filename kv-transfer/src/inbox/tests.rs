use super::*;
use crate::{QuarantinedBlocks, TransferAddress};
use baton_types::fence::AlreadyDone;
use baton_types::{BlockTables, Incarnation, InstanceId};
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

fn open(inbox: &Inbox) -> Result<HandoffKey, TransferError> {
    let party = Party { instance: InstanceId::try_new("d").unwrap(), incarnation: Incarnation(1) };
    let peer = Peer { party, address: TransferAddress::Tcp(([127, 0, 0, 1], 1).into()), shard: 0 };
    let (request_id, blocks) = (RequestId::try_new("r").unwrap(), BlockTables::default());
    let request = PutRequest { request_id, tokens: 1, blocks, deadline: Instant::now(), hold: Box::new(()) };
    inbox.put(peer, request, oneshot::channel().0)
}

fn kinds(inbox: &Inbox) -> Vec<&'static str> {
    let kind = |command: &Command| match command {
        Command::Put { .. } => "put",
        Command::Input(_, Input::Abort(_)) => "abort",
        Command::Input(_, Input::Granted(_)) => "granted",
        _ => "other",
    };
    inbox.drain().iter().map(kind).collect()
}

#[test]
fn handoffs_and_their_launches_are_bounded() {
    let inbox = Inbox::new(1, Box::new(|| {}));
    let key = open(&inbox).unwrap();
    assert!(matches!(open(&inbox), Err(TransferError::TooManyHandoffs { limit: 1 })));
    assert_eq!(kinds(&inbox), ["put"]);
    for _ in 0..Inbox::LAUNCHES_MAX + 5 {
        inbox.launched(key, 0, 1, Arc::new(AlreadyDone));
    }
    let queued = kinds(&inbox);
    assert_eq!((queued.len(), queued.last()), (Inbox::LAUNCHES_MAX + 1, Some(&"abort")));
    inbox.begun_ended(key);
    inbox.launched(key, 0, 1, Arc::new(AlreadyDone));
    inbox.abort(key, "late".into());
    assert!(kinds(&inbox).is_empty(), "nothing is queued for a handoff that ended");
    assert!(open(&inbox).is_ok());
}

struct Counted(Arc<AtomicUsize>, BlockTables);
impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}
impl QuarantinedBlocks for Counted {
    fn release(self: Box<Self>) {}
}
impl BlockHold for Counted {
    fn blocks(&self) -> &BlockTables {
        &self.1
    }
    fn quarantine(self: Box<Self>) -> Box<dyn QuarantinedBlocks> {
        self
    }
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

#[test]
fn an_answer_is_taken_once_and_only_while_the_offer_stands() {
    let inbox = Inbox::new(1, Box::new(|| {}));
    let dropped = Arc::new(AtomicUsize::new(0));
    let hold = || Box::new(Counted(dropped.clone(), BlockTables::default()));
    let r = RequestId::try_new("r").unwrap();
    let (first, second) = (inbox.offer(&r), inbox.offer(&r));
    inbox.answered(first, Input::Granted(hold()));
    inbox.answered(first, Input::Refused { reason: RefuseReason::NoRoom, detail: String::new() });
    inbox.offer_ended(second, &r);
    assert!(!inbox.is_offered(second));
    inbox.answered(second, Input::Granted(hold()));
    assert_eq!(dropped.load(Ordering::SeqCst), 1, "a late grant is handed straight back");
    assert_eq!(kinds(&inbox), ["granted"]);
    let third = inbox.offer(&r);
    inbox.answered(third, Input::Granted(hold()));
    inbox.close();
    assert_eq!(dropped.load(Ordering::SeqCst), 3, "closing hands everything back");
    assert!(matches!(open(&inbox), Err(TransferError::Stopped)));
}

#[test]
fn cancellations_are_bounded_by_what_is_received() {
    let inbox = Inbox::new(1, Box::new(|| {}));
    let (r, other) = (RequestId::try_new("r").unwrap(), RequestId::try_new("other").unwrap());
    let cancelled = || {
        let key = |command| if let Command::Input(key, Input::Abort(_)) = command { Some(key) } else { None };
        inbox.drain().into_iter().filter_map(key).collect::<Vec<_>>()
    };
    let first = inbox.offer(&r);
    for _ in 0..1000 {
        inbox.cancel(&r, "x");
        inbox.cancel(&other, "nothing of it is here");
    }
    let second = inbox.offer(&r);
    inbox.cancel(&r, "x");
    assert_eq!(cancelled(), [first, second]);
    inbox.cancel(&r, "x");
    assert_eq!(cancelled(), [first, second], "a cancellation that was taken may be followed by another");
    inbox.offer_ended(first, &r);
    inbox.offer_ended(second, &r);
    inbox.cancel(&r, "x");
    assert!(cancelled().is_empty());
}

#[test]
fn an_offer_can_be_cancelled_for_itself() {
    let (inbox, r) = (Arc::new(Inbox::new(1, Box::new(|| {}))), RequestId::try_new("r").unwrap());
    let (first, _second) = (inbox.offer(&r), inbox.offer(&r));
    let offer = OfferOf { inbox: inbox.clone(), key: first };
    assert!(offer.is_wanted());
    offer.cancel("x".into());
    let queued = inbox.drain();
    assert!(matches!(&queued[..], [Command::Input(key, Input::Abort(_))] if *key == first));
}

#[test]
fn a_sleeper_is_woken_once() {
    let wakes = Arc::new(AtomicUsize::new(0));
    let count = wakes.clone();
    let inbox = Inbox::new(
        2,
        Box::new(move || {
            count.fetch_add(1, Ordering::SeqCst);
        }),
    );
    let first = open(&inbox).unwrap();
    assert_eq!(wakes.load(Ordering::SeqCst), 0, "nobody sleeps");
    assert!(!inbox.may_sleep(), "there is work");
    inbox.drain();
    assert!(inbox.may_sleep());
    inbox.abort(first, "x".into());
    inbox.abort(first, "y".into());
    assert_eq!(wakes.load(Ordering::SeqCst), 1);
}
