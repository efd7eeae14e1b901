//! The stream from a router to one worker: its own messages as they come, and changes of the members between them.

use crate::membership::MembershipView;
use baton_proto::v1::{self, join_response};
use baton_types::{Incarnation, InstanceId};
use futures::stream::{BoxStream, unfold};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::{mpsc, watch};
use tonic::Status;

/// Most members of one message.
const MEMBERS_MAX: usize = 1_024;

type Reply = Result<v1::JoinResponse, Status>;

/// The stream of one worker. The view is read only when the connection accepts another message: a slow reader gets all
/// changes in one message, and nothing waits for it.
pub(super) fn member_updates(
    verdicts: mpsc::Receiver<Reply>,
    view: watch::Receiver<Arc<MembershipView>>,
) -> BoxStream<'static, Reply> {
    let updates = MemberUpdates { verdicts, view, is_registered: false, sent: SentMembers::default() };
    Box::pin(unfold(updates, |mut updates| async move { Some((updates.next().await?, updates)) }))
}

struct MemberUpdates {
    verdicts: mpsc::Receiver<Reply>,
    view: watch::Receiver<Arc<MembershipView>>,
    /// The registration is the first message.
    is_registered: bool,
    sent: SentMembers,
}

impl MemberUpdates {
    /// `None` once the session has ended.
    async fn next(&mut self) -> Option<Reply> {
        loop {
            if self.is_registered {
                if let Ok(verdict) = self.verdicts.try_recv() {
                    return Some(verdict);
                }
                let view = self.view.borrow_and_update().clone();
                if let Some(members) = self.sent.next_message(&view) {
                    return Some(Ok(v1::JoinResponse { message: Some(join_response::Message::Members(members)) }));
                }
            }
            tokio::select! {
                verdict = self.verdicts.recv() => {
                    self.is_registered = true;
                    return verdict;
                }
                Ok(()) = self.view.changed(), if self.is_registered => {}
            }
        }
    }
}

/// The members that this stream has already sent to a worker. Pure.
#[derive(Debug, Default)]
struct SentMembers {
    began: bool,
    members: BTreeMap<InstanceId, Incarnation>,
    /// The revision of the view up to which the worker is complete.
    whole: Option<u64>,
}

impl SentMembers {
    /// The next message; `None` if the worker knows all members.
    fn next_message(&mut self, view: &MembershipView) -> Option<v1::Members> {
        if self.whole == Some(view.revision) {
            return None;
        }
        let gone = self.members.keys().filter(|instance| !view.members.contains_key(*instance));
        let gone: Vec<InstanceId> = gone.take(MEMBERS_MAX).cloned().collect();
        let parties = view.members.values().map(|member| &member.record.party);
        let new = parties.filter(|party| self.members.get(&party.instance) != Some(&party.incarnation));
        let new: Vec<_> = new.take(MEMBERS_MAX - gone.len()).cloned().collect();
        let anew = !std::mem::replace(&mut self.began, true);
        if !anew && gone.is_empty() && new.is_empty() {
            self.whole = Some(view.revision);
            return None;
        }
        for instance in &gone {
            self.members.remove(instance);
        }
        self.members.extend(new.iter().map(|party| (party.instance.clone(), party.incarnation)));
        let left = gone.iter().map(InstanceId::to_string).collect();
        Some(v1::Members { anew, joined: new.into_iter().map(Into::into).collect(), left })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership::conformance::record;
    use crate::membership::{Member, Registration};

    fn view(revision: u64, members: impl IntoIterator<Item = (String, u64)>) -> MembershipView {
        let member = |(name, incarnation): (String, u64)| {
            let record = Arc::new(record(&name, incarnation));
            let registration = Registration { incarnation: record.party.incarnation, revision };
            (record.party.instance.clone(), Member { record, registration })
        };
        MembershipView { members: members.into_iter().map(member).collect(), revision }
    }

    /// `anew? +joined.. -left..` of each message until there are no more changes.
    fn told(told: &mut SentMembers, view: &MembershipView) -> Vec<String> {
        let line = |message: v1::Members| {
            let joined = message.joined.iter().map(|p| format!(" +{}{}", p.instance, p.incarnation));
            let left = message.left.iter().map(|name| format!(" -{name}"));
            let anew = if message.anew { "anew" } else { "" };
            format!("{anew}{}", joined.chain(left).collect::<String>())
        };
        std::iter::from_fn(|| told.next_message(view)).map(line).collect()
    }

    #[test]
    fn a_worker_is_told_everyone_then_what_changes() {
        let (mut state, of) = (SentMembers::default(), |members: &[(&str, u64)]| {
            members.iter().map(|(name, incarnation)| ((*name).to_owned(), *incarnation)).collect::<Vec<_>>()
        });
        assert_eq!(told(&mut state, &view(1, of(&[("a", 1), ("b", 2)]))), ["anew +a1 +b2"]);
        assert!(told(&mut state, &view(1, of(&[("a", 1), ("b", 2)]))).is_empty());
        assert_eq!(told(&mut state, &view(4, of(&[("b", 3), ("c", 4)]))), [" +b3 +c4 -a"]);
        assert!(
            told(&mut state, &view(5, of(&[("b", 3), ("c", 4)]))).is_empty(),
            "another registration of the same start"
        );
        assert_eq!(told(&mut SentMembers::default(), &view(1, [])), ["anew"], "nobody is news as well");
    }

    #[test]
    fn no_message_is_larger_than_its_bound() {
        let mut state = SentMembers::default();
        let many = view(1, (0..2_500).map(|n| (format!("w{n:04}"), n)));
        let sizes = |state: &mut SentMembers, view: &MembershipView| {
            std::iter::from_fn(|| state.next_message(view)).map(|m| m.joined.len() + m.left.len()).collect::<Vec<_>>()
        };
        assert_eq!(sizes(&mut state, &many), [1_024, 1_024, 452]);
        assert_eq!(sizes(&mut state, &view(2, (2_400..2_600).map(|n| (format!("w{n:04}"), n)))), [1_024, 1_024, 452]);
    }
}
