//! Handoffs between chosen pairs of workers, requested as a router does, with its own view of etcd. Routers choose by load, so a pair
//! without handoffs may be busy elsewhere and still work.

use super::stage::{Node, Stage};
use crate::load::{Case, Known, Tokens};
use anyhow::{Context, bail, ensure};
use baton_node::membership::RouterMembership as _;
use baton_node::membership::etcd::EtcdRouter;
use baton_proto::v1::decode_client::DecodeClient;
use baton_proto::v1::decode_event::Event as Decode;
use baton_proto::v1::decode_request::Prefill as How;
use baton_proto::v1::prefill_client::PrefillClient;
use baton_proto::v1::prefill_event::Event as Prefill;
use baton_proto::v1::{
    AwaitKv, DecodeEvent, DecodeRequest, FinishReason, Party, PrefillEvent, PrefillRequest, Sequence, Token,
};
use baton_types::{InstanceId, InstanceRecord, SamplingParams};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::timeout;
use tonic::Streaming;

/// Most workers in its view.
const MEMBERS_MAX: usize = 16;
/// Its requests have priority over waiting ones: a long wait in a queue does not show whether the pair works.
const PRIORITY: i32 = 50;
/// Longest wait for a worker's first event before a retry over another connection: a connection that lost packets may be slow for long.
const WORD_MAX: Duration = Duration::from_secs(2);

/// A client that requests handoffs.
pub struct Handoffs {
    view: EtcdRouter,
    known: Vec<Known>,
    asked: AtomicU64,
}

impl Handoffs {
    /// Watches the membership of `stage`. Handoffs must return the answers `known` in turn, which must be greedy.
    pub(super) async fn start(stage: &Stage, known: Vec<Known>) -> Self {
        assert!(!known.is_empty() && known.iter().all(|known| !known.case.drawn), "{known:?} are not greedy");
        let view = EtcdRouter::start(&stage.etcd.lock().await.config(), MEMBERS_MAX);
        Self { view, known, asked: AtomicU64::new(0) }
    }

    /// One handoff from `prefill` to `decode`, and the answer after it; `at` receives its progress. `Ok` holds what was wrong with the
    /// answer, if anything.
    pub async fn one(
        &self,
        stage: &Stage,
        (prefill, decode): (Node, Node),
        at: impl Fn(&'static str),
    ) -> anyhow::Result<Option<String>> {
        at("waits for a claim");
        let (source, sink) = (self.record(prefill)?, self.record(decode)?);
        let number = self.asked.fetch_add(1, Ordering::Relaxed);
        let known = &self.known[number as usize % self.known.len()];
        let sequence = sequence(format!("{prefill}-to-{decode}-{number}"), known);
        let address = sink.shards.first().context("a worker without a shard")?.transfer_address.clone();

        let mut at_decode = DecodeClient::new(stage.channel(decode)?);
        let how = Some(How::AwaitKv(AwaitKv { source: Some(source.party.clone().into()) }));
        let claim = async {
            let party = Some(sink.party.clone().into());
            let request = DecodeRequest { sequence: Some(sequence.clone()), prefill: how, party };
            let mut stream = at_decode.generate(request).await?.into_inner();
            let first = stream.message().await?.and_then(|message| message.event);
            ensure!(matches!(first, Some(Decode::Claimed(_))), "{decode} says {first:?} instead of a claim");
            anyhow::Ok(stream)
        };
        let decoded = timeout(WORD_MAX, claim).await.with_context(|| format!("{decode} takes no claim"))??;

        at("waits for a first token");
        let mut at_prefill = PrefillClient::new(stage.channel(prefill)?);
        let sink_party: Party = sink.party.clone().into();
        let party = Some(source.party.clone().into());
        let run = PrefillRequest {
            sequence: Some(sequence),
            sink: Some(sink_party),
            sink_address: address.into(),
            party,
            get: None,
        };
        let run =
            timeout(WORD_MAX, at_prefill.run(run)).await.with_context(|| format!("{prefill} takes no prompt"))??;
        let (first, rest) = tokio::try_join!(first_token(run.into_inner(), &at), adopted_tokens(decoded, &at))?;
        let tokens: Tokens = [first].into_iter().chain(rest).map(bits).collect();
        let right = &known.answer[0];
        Ok((tokens != *right).then(|| format!("{tokens:?}, undisturbed {right:?}")))
    }

    fn record(&self, node: Node) -> anyhow::Result<Arc<InstanceRecord>> {
        let instance = InstanceId::try_new(node.to_string())?;
        let view = self.view.view();
        let member = view.borrow().members.get(&instance).map(|member| member.record.clone());
        member.with_context(|| format!("{node} is not registered"))
    }
}

impl Drop for Handoffs {
    fn drop(&mut self) {
        self.view.close();
    }
}

fn sequence(request_id: String, known: &Known) -> Sequence {
    let Case { prompt: prompt_len, answer: max_tokens, .. } = known.case;
    let sampling = SamplingParams { max_tokens, ignore_eos: true, logprobs: Some(0), ..SamplingParams::default() };
    Sequence {
        request_id,
        tokens: known.prompt(),
        prompt_len,
        sampling: Some(sampling.into()),
        sample_index: 0,
        priority: PRIORITY,
        cache: None,
        share: None,
        adapter: Default::default(),
    }
}

fn bits(token: Token) -> (u32, u32) {
    (token.id, token.logprobs.map_or(0, |l| l.chosen.to_bits()))
}

/// The first token, once the decode worker has acknowledged the KV.
async fn first_token(mut run: Streaming<PrefillEvent>, at: impl Fn(&'static str)) -> anyhow::Result<Token> {
    let mut first = None;
    while let Some(message) = run.message().await.context("prefill")? {
        match message.event {
            Some(Prefill::Token(token)) => {
                at("waits for the KV");
                first = Some(token);
            }
            Some(Prefill::Done(_)) => return first.context("prefill is done without a token"),
            _ => {}
        }
    }
    bail!("prefill ended early")
}

/// All further tokens, generated from the adopted KV.
async fn adopted_tokens(mut decode: Streaming<DecodeEvent>, at: impl Fn(&'static str)) -> anyhow::Result<Vec<Token>> {
    let (mut adopted, mut tokens) = (false, Vec::<Token>::new());
    while let Some(message) = decode.message().await.context("decode")? {
        match message.event {
            Some(Decode::Adopted(_)) => {
                at("waits for tokens");
                adopted = true;
            }
            Some(Decode::Token(token)) => tokens.push(token),
            _ => {}
        }
    }
    ensure!(adopted, "decode ended before KV was adopted");
    let ended = tokens.last().is_some_and(|token| token.finish_reason() != FinishReason::Unspecified);
    ensure!(ended, "decode ended early");
    Ok(tokens)
}
