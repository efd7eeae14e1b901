//! From a request to tokens: all steps before workers are involved, and the admission queue.

use super::core::Core;
use super::hashes::prompt_hashes;
use super::tokenize::Work;
use crate::admission::Slot;
use crate::models::{Named, lookup};
use crate::placement::Reason;
use crate::quotas::Quota;
use crate::request::{AskedGrammar, Parameters, PrefillPolicy, Prompt, Request, Sampling, check_tokens, check_vocab};
use crate::workers::ServedModel;
use baton_kv_cache::PrefixHash;
use baton_types::{AdapterCard, CacheUse, ErrorKind, Grammar, ModelCard, RequestError, SamplingParams, TokenId};
use std::ops::Deref;
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use tracing::{Instrument, Span};

/// A request after validation and tokenization. Its own `sampling` and `cache` are the resolved ones.
#[derive(Debug)]
pub struct Prepared {
    request: Request,
    pub(crate) model: Arc<ServedModel>,
    /// The adapter that computes it, by the digest that was served when it came: every attempt has this one.
    pub(crate) adapter: Option<AdapterCard>,
    /// Tokens of its prompt.
    pub tokens: Arc<[TokenId]>,
    /// Hashes of the cacheable blocks of its prompt.
    pub(crate) hashes: Arc<[PrefixHash]>,
    /// How it uses prefix caches; `None` shares nothing.
    pub(crate) cache: Option<CacheUse>,
    /// Complete, including the drawn seed if none was given.
    pub sampling: SamplingParams,
    /// Where its prompt is prefilled.
    pub(crate) policy: PrefillPolicy,
    /// Why its first attempt ran where it did.
    pub(crate) placed: OnceLock<Reason>,
}

impl Prepared {
    /// Hashes of the cacheable blocks of its prompt.
    #[doc(hidden)] // For simulations.
    pub fn hashes(&self) -> &[PrefixHash] {
        &self.hashes
    }

    /// The name of what answers: the adapter, or the model's id.
    pub(crate) fn served_name(&self) -> &str {
        self.adapter.as_ref().map_or(&self.model.card.id, |adapter| &adapter.name)
    }

    /// Control tokens by which the parts of its answer are told apart: its text has them.
    pub(crate) fn marks(&self) -> Arc<[TokenId]> {
        let Some(text) = &self.model.text else { return Arc::default() };
        let Some(format) = text.answer_format() else { return Arc::default() };
        format.marks(self.tools.is_some()).filter_map(|mark| text.token_id(mark)).collect()
    }

    /// Name of the reason why its first attempt ran where it did.
    #[doc(hidden)] // For simulations.
    pub fn placed(&self) -> Option<&'static str> {
        self.placed.get().map(|reason| reason.name())
    }
}

impl Deref for Prepared {
    type Target = Request;

    fn deref(&self) -> &Request {
        &self.request
    }
}

/// A prepared request, and the resources that it holds until it ends.
#[derive(Debug)]
pub(super) struct Admitted {
    pub(super) request: Arc<Prepared>,
    /// One for each sample.
    pub(super) slots: Vec<Slot>,
    pub(super) quota: Quota,
}

/// Refuses a grammar whose answers could not end.
fn check_ends(request: &Request, card: &ModelCard) -> Result<(), RequestError> {
    match &request.sampling.grammar {
        Some(AskedGrammar { param, .. }) if card.end_tokens.is_empty() => {
            Err(RequestError::invalid(*param, "this model has no end token, so its answers can follow no grammar"))
        }
        _ => Ok(()),
    }
}

/// Binds an answer that must call tools to calls in the notation of its model.
fn require_calls(parameters: &mut Parameters, model: &ServedModel) -> Result<(), RequestError> {
    let Some(tools) = &mut parameters.tools else { return Ok(()) };
    // Without text or template the chat is refused as such.
    let Some((text, format)) = model.text.as_ref().and_then(|text| Some((text, text.answer_format()?))) else {
        return Ok(());
    };
    let grammar = tools.grammar(format.calls, |token| text.token_id(token))?;
    tools.keep_names();
    if let Some(grammar) = grammar {
        parameters.sampling.grammar = Some(AskedGrammar { grammar: Arc::new(grammar), param: "tools" });
    }
    Ok(())
}

impl Core {
    /// Checks, admits and tokenizes.
    pub(super) async fn prepare(
        &self,
        mut request: Request,
        prompt: Prompt,
        span: &Span,
    ) -> Result<Admitted, RequestError> {
        if self.draining.is_cancelled() {
            let message = "this router is draining; send the request to another";
            return Err(RequestError::new(ErrorKind::Unavailable, message));
        }
        if request.deadline <= self.runtime.now() {
            let message = "the deadline had passed when the request came";
            return Err(RequestError::new(ErrorKind::DeadlineExceeded, message));
        }
        request.check()?;
        let cache = self.cache.resolve(&request.tenant, &request.cache)?;
        let key = request.key.as_ref();
        let mut quota = self.quotas.enter(key, request.samples, request.priority)?;
        let key = key.map(|key| key.id);
        let slots = self.admission.enter_all(request.samples, request.priority, key, request.share())?;

        let Named { model, adapter } = self.named(&request.model, request.deadline).await?;
        let served = adapter.as_ref().map_or(&model.card.id, |adapter| &adapter.name);
        span.record("gen_ai.response.model", served.as_str());
        if model.text.is_none() && !request.stops.is_empty() {
            return Err(RequestError::invalid("stop", "this model has no text; use stop_token_ids"));
        }
        let Sampling { stop_token_ids, allowed_token_ids, logit_bias, .. } = &request.sampling;
        check_vocab("stop_token_ids", stop_token_ids, &model.card)?;
        check_vocab("allowed_token_ids", allowed_token_ids, &model.card)?;
        check_vocab("logit_bias", &logit_bias.iter().map(|(token, _)| *token).collect::<Vec<_>>(), &model.card)?;

        let tokenize = tracing::info_span!(parent: span, "tokenize");
        require_calls(&mut request.parameters, &model)?;
        check_ends(&request, &model.card)?;
        let grammar = request.sampling.grammar.clone();
        let is_form = grammar.as_ref().is_some_and(|asked| !matches!(*asked.grammar, Grammar::Calls(_)));
        let opens_content = is_form && matches!(prompt, Prompt::Chat { .. });
        let work = Work { prompt, grammar };
        let tokenized = self.tokenizing.run(&*self.runtime, work, &model, request.deadline, slots);
        let (mut tokens, slots) = tokenized.instrument(tokenize).await?;
        if let Some(text) = model.text.as_ref().filter(|_| opens_content) {
            tokens.extend(text.opens_content()?);
        }
        check_tokens(&tokens, &model.card)?;
        let random = self.runtime.random();
        let sampling = request.sampling.resolve(&model.card.defaults, tokens.len(), model.tokens_max, random)?;
        sampling.check_ends(&model.card.end_tokens)?;
        quota.add_tokens(tokens.len() as u64 + u64::from(request.samples) * u64::from(sampling.max_tokens))?;
        span.record("gen_ai.request.max_tokens", sampling.max_tokens);
        span.record("gen_ai.request.temperature", f64::from(sampling.temperature));
        span.record("gen_ai.request.top_p", f64::from(sampling.top_p));
        span.record("gen_ai.request.seed", sampling.seed);
        let tokens: Arc<[TokenId]> = tokens.into();
        let (fingerprint, digest) = (&model.card.fingerprint, adapter.as_ref().map(|adapter| adapter.digest));
        let hashes = prompt_hashes(&*self.runtime, cache.as_ref(), fingerprint, digest, &tokens).await?;
        let policy = request.prefill_policy.unwrap_or(self.limits.policy);
        let placed = OnceLock::new();
        let request = Arc::new(Prepared { request, model, adapter, tokens, hashes, cache, sampling, policy, placed });
        Ok(Admitted { request, slots, quota })
    }

    /// The tokens of a prompt that is not run, and the model that they are for.
    pub(crate) async fn tokens_of(
        &self,
        model: &str,
        prompt: Prompt,
        deadline: Instant,
    ) -> Result<(Vec<TokenId>, Arc<ServedModel>), RequestError> {
        let model = self.served_model(model, deadline).await?;
        let work = Work { prompt, grammar: None };
        let (tokens, _) = self.tokenizing.run(&*self.runtime, work, &model, deadline, Vec::new()).await?;
        Ok((tokens, model))
    }

    /// The requested model, or that of the requested adapter.
    pub(crate) async fn served_model(&self, name: &str, deadline: Instant) -> Result<Arc<ServedModel>, RequestError> {
        Ok(self.named(name, deadline).await?.model)
    }

    /// What the client's name for a model stands for. If no worker of it is ready, waits briefly: workers that were unreachable may return.
    async fn named(&self, name: &str, deadline: Instant) -> Result<Named, RequestError> {
        let until = deadline.min(self.runtime.now() + self.limits.retry.ready_max);
        loop {
            let now = self.runtime.now();
            match lookup(&self.workers.models(now), name) {
                Err(error) if error.kind == ErrorKind::Unavailable && now < until => {}
                Err(error) if error.kind == ErrorKind::ModelNotFound && self.workers.may_be_back(name, now) => {
                    if now >= until {
                        let message = format!("no decode worker of {:.256?} is ready to serve; try again later", name);
                        return Err(RequestError::new(ErrorKind::Unavailable, message));
                    }
                }
                found => return found,
            }
            tokio::select! {
                biased;
                () = self.abort.cancelled() => {
                    return Err(RequestError::new(ErrorKind::Unavailable, "the router is stopping; send the request again"));
                }
                () = self.runtime.sleep(self.limits.retry.backoff_min) => {}
            }
        }
    }
}
