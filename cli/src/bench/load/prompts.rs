//! Token ids with exactly the sharing that a trace records.
//!
//! A block's tokens are a function of seed, block id and position, so equal blocks have equal tokens everywhere. Different blocks must
//! differ if they follow the same blocks. These are numbered in order of appearance, and their first tokens spell that number, in digits
//! to the base of the range of ids. So they differ there, whatever the function gives for the rest.

use crate::bench::trace::Trace;
use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// The range of token ids used. The default is ordinary text in any tokenizer with a vocabulary of at least 32,000: control tokens and
/// bytes are before it, or at the end of the vocabulary.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct TokenRange(RangeInclusive<u32>);

impl Default for TokenRange {
    fn default() -> Self {
        Self(1_000..=31_999)
    }
}

impl std::fmt::Display for TokenRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.0.start(), self.0.end())
    }
}

impl FromStr for TokenRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (first, last) = text.split_once('-').unwrap_or_default();
        match (first.parse(), last.parse()) {
            (Ok(first), Ok(last)) if first < last => Ok(Self(first..=last)),
            _ => Err("give the first and the last id, as in 1000-31999".into()),
        }
    }
}

impl TokenRange {
    /// The range `ids`, at least 2 ids.
    pub(crate) fn of(ids: RangeInclusive<u32>) -> Self {
        Self(ids)
    }

    /// How many ids there are, at least 2.
    fn count(&self) -> u64 {
        u64::from(*self.0.end()) - u64::from(*self.0.start()) + 1
    }

    fn id(&self, number: u64) -> u32 {
        // Below the range's end, which is a u32.
        self.0.start() + (number % self.count()) as u32
    }
}

/// Prompts of a trace.
pub(crate) struct Prompts {
    range: TokenRange,
    seed: u64,
    /// For each request, each block's number among those that follow the same blocks.
    numbers: Vec<Vec<u32>>,
    /// Tokens of a block that spell its number: 1 unless the number of blocks that follow the same ones exceeds the number of ids.
    digits: u32,
}

impl Prompts {
    /// Numbers the blocks. Another seed gives other prompts, which share almost nothing with the former.
    pub(crate) fn new(trace: &Trace, range: TokenRange, seed: u64) -> Self {
        // Maps the blocks before a block, by a number of their own, to the number of different blocks seen after them.
        let mut places: HashMap<(u64, u64), (u64, u32)> = HashMap::new();
        let mut followers: HashMap<u64, u32> = HashMap::new();
        let mut most = 0;
        let mut numbers = Vec::with_capacity(trace.requests.len());
        for request in &trace.requests {
            let mut parent = 0;
            let mut of_request = Vec::with_capacity(request.blocks.len());
            for &block in &request.blocks {
                let fresh = places.len() as u64 + 1;
                let (place, number) = *places.entry((parent, block)).or_insert_with(|| {
                    let next = followers.entry(parent).or_default();
                    *next += 1;
                    (fresh, *next - 1)
                });
                most = most.max(number);
                of_request.push(number);
                parent = place;
            }
            numbers.push(of_request);
        }
        let digits = u64::from(most).checked_ilog(range.count()).unwrap_or(0) + 1;
        Self { range, seed, numbers, digits }
    }

    /// The prompt of request `index` of `trace`, from which this was made.
    pub(crate) fn prompt(&self, trace: &Trace, index: usize) -> Vec<u32> {
        let request = &trace.requests[index];
        let mut tokens = Vec::with_capacity(request.prompt_tokens as usize);
        for (place, (&block, &number)) in request.blocks.iter().zip(&self.numbers[index]).enumerate() {
            let length = request.tokens_of_block(place, trace.block_tokens);
            tokens.extend((0..length).map(|position| self.token(block, number, position)));
        }
        tokens
    }

    fn token(&self, block: u64, number: u32, position: u32) -> u32 {
        if position >= self.digits {
            return self.range.id(mixed(mixed(self.seed ^ mixed(block)) ^ u64::from(position)));
        }
        let digit = u64::from(number) / self.range.count().pow(position);
        // Mixed with the seed, so that prompts of two seeds rarely begin in the same way.
        self.range.id(mixed(self.seed ^ u64::from(position)) % self.range.count() + digit % self.range.count())
    }
}

/// The finalizer of SplitMix64 (Steele, Lea, Flood 2014): each bit of the result depends on each of the argument.
fn mixed(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::trace::TraceRequest;
    use std::time::Duration;

    fn trace(block_tokens: u32, requests: &[(u32, &[u64])]) -> Trace {
        let request = |&(prompt_tokens, blocks): &(u32, &[u64])| TraceRequest {
            at: Duration::ZERO,
            prompt_tokens,
            output_tokens: 1,
            blocks: blocks.to_vec(),
        };
        Trace { requests: requests.iter().map(request).collect(), block_tokens, sharing_known: true }
    }

    fn all(trace: &Trace, range: &TokenRange, seed: u64) -> Vec<Vec<u32>> {
        let prompts = Prompts::new(trace, range.clone(), seed);
        (0..trace.requests.len()).map(|index| prompts.prompt(trace, index)).collect()
    }

    fn shared(one: &[u32], other: &[u32]) -> usize {
        one.iter().zip(other).take_while(|(a, b)| a == b).count()
    }

    /// The number of leading tokens that two requests share, according to the trace.
    fn told(trace: &Trace, one: usize, other: usize) -> usize {
        let (one, other) = (&trace.requests[one], &trace.requests[other]);
        let blocks = one.blocks.iter().zip(&other.blocks).take_while(|(a, b)| a == b).count();
        (blocks * trace.block_tokens as usize).min(one.prompt_tokens as usize).min(other.prompt_tokens as usize)
    }

    /// 400 requests of up to 6 blocks, each drawn from a few blocks, so that much is shared; the prompt may end anywhere in its last
    /// block.
    fn tangled(block_tokens: u32) -> Trace {
        let drawn = |n: u64, below: u64| mixed(n) % below;
        let requests: Vec<(u32, Vec<u64>)> = (0..400)
            .map(|n| {
                let blocks: Vec<u64> = (0..=drawn(n, 6)).map(|place| drawn(n * 31 + place, 3 + place * 9)).collect();
                let last = 1 + drawn(n * 17, block_tokens.into()) as u32;
                ((blocks.len() as u32 - 1) * block_tokens + last, blocks)
            })
            .collect();
        trace(block_tokens, &requests.iter().map(|(tokens, blocks)| (*tokens, &blocks[..])).collect::<Vec<_>>())
    }

    #[test]
    fn two_requests_share_exactly_what_the_trace_tells() {
        let trace = tangled(16);
        for range in [TokenRange::default(), TokenRange(5..=64)] {
            let prompts = all(&trace, &range, 7);
            for (one, request) in trace.requests.iter().enumerate() {
                assert_eq!(prompts[one].len(), request.prompt_tokens as usize);
                for other in 0..one {
                    let (got, want) = (shared(&prompts[one], &prompts[other]), told(&trace, one, other));
                    assert_eq!(got, want, "{one} and {other}, ids {range}");
                }
            }
        }
    }

    #[test]
    fn tokens_stay_in_their_range_and_use_it() {
        let range = TokenRange(100..=119);
        let trace = trace(512, &[(512, &[0]), (512, &[1])]);
        let prompts = all(&trace, &range, 0);
        let used: std::collections::BTreeSet<u32> = prompts.concat().into_iter().collect();
        assert_eq!(used, (100..=119).collect());
    }

    #[test]
    fn more_blocks_than_ids_differ_after_as_few_tokens_as_can_be() {
        // 50 first blocks with 4 ids: 3 tokens distinguish 64.
        let blocks: Vec<[u64; 1]> = (0..50).map(|id| [id]).collect();
        let trace = trace(16, &blocks.iter().map(|block| (16, &block[..])).collect::<Vec<_>>());
        let prompts = all(&trace, &TokenRange(0..=3), 1);
        for (index, one) in prompts.iter().enumerate() {
            assert!(prompts[..index].iter().all(|other| shared(one, other) < 3));
        }
    }

    #[test]
    fn a_seed_gives_the_same_prompts_and_another_seed_others() {
        let trace = trace(512, &[(700, &[0, 1])]);
        let of = |seed| all(&trace, &TokenRange::default(), seed).remove(0);
        assert_eq!(of(1), of(1));
        assert!(shared(&of(1), &of(2)) < 16);
    }

    #[test]
    fn ranges_are_read() {
        assert_eq!("3-9".parse(), Ok(TokenRange(3..=9)));
        assert_eq!("0-4294967295".parse::<TokenRange>().unwrap().count(), 1 << 32);
        for wrong in ["9", "9-3", "3-3", "a-b", ""] {
            assert!(wrong.parse::<TokenRange>().unwrap_err().contains("1000-31999"), "{wrong}");
        }
    }
}
