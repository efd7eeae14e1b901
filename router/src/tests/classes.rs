//! Answers that continue on workers of other numerics classes.

use crate::testing::cluster::{Cluster, Reader, ask};
use crate::testing::fake::Fake;
use crate::testing::text::tokens;
use crate::testing::two::either;
use baton_proto::v1::FinishReason;
use baton_types::Role;
use tonic::Status;

/// A worker of another class than those of [`Cluster::worker`].
async fn of_another_class(cluster: &Cluster, name: &str) -> Fake {
    cluster.worker_with(Role::Decode, name, |r| r.class.kernel_revision += 1).await
}

/// The classes that the end of an answer names.
async fn crossed(answer: &mut Reader) -> Vec<String> {
    loop {
        let message = answer.next().await;
        if message.finish_reason() != FinishReason::Unspecified {
            return message.crossed_classes;
        }
    }
}

#[tokio::test]
async fn an_answer_stays_with_the_numerics_class_that_began_it() {
    let cluster = Cluster::start(|_| ()).await;
    let d = [cluster.worker(Role::Decode, "d0").await, cluster.worker(Role::Decode, "d1").await];
    let mut answer = cluster.generate(ask("x")).await;
    let (mut call, _, other) = either(&d).await;
    let _of_another = of_another_class(&cluster, "other").await;
    call.claimed().await;
    call.say("1").await;
    answer.reads("1").await;
    call.fail(Status::unavailable("broken")).await;
    let call = other.decode().await;
    call.claimed().await;
    call.last(b'2'.into(), FinishReason::Length).await;
    assert!(crossed(&mut answer).await.is_empty(), "one of its own class is asked");
}

#[tokio::test]
async fn an_answer_whose_class_is_gone_goes_on_and_says_so() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let mut answer = cluster.generate(ask("x")).await;
    let mut call = d.decode().await;
    let other = of_another_class(&cluster, "other").await;
    call.claimed().await;
    call.say("1").await;
    answer.reads("1").await;
    d.report(|load| load.draining = true);
    // Until that report arrives, the same worker may be called again.
    let call = loop {
        call.fail(Status::unavailable("broken")).await;
        tokio::select! {
            again = d.decode() => call = again,
            elsewhere = other.decode() => break elsewhere,
        }
    };
    call.claimed().await;
    assert_eq!(call.sequence().tokens, [tokens("x"), tokens("1")].concat());
    call.last(b'2'.into(), FinishReason::Length).await;
    assert_eq!(crossed(&mut answer).await, ["test/w-f32/kv-f32/r1", "test/w-f32/kv-f32/r2"]);
    // An answer that begins there is not marked.
    let mut answer = cluster.generate(ask("x")).await;
    let call = other.decode().await;
    call.claimed().await;
    call.last(b'1'.into(), FinishReason::Length).await;
    assert!(crossed(&mut answer).await.is_empty());
}
