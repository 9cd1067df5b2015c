//! Uneven hosts in a row against an exhaustive twin that shares no code with the search.

use hpgo::planner::chain::{Chain, ChainPlan, Hop, HostType, Objective, partition};
use hpgo::{Control, Error};
use proptest::prelude::*;

/// Everything the twin knows about a finished plan.
#[derive(Clone, Copy)]
struct Value {
    interval_s: f64,
    latency_s: f64,
    hosts: usize,
    bits_lost: u32,
}

/// Prices plans straight from the definitions: sums over layers, no prefix sums, no bounds.
struct RelaxedPlan<'a> {
    chain: &'a Chain,
    limit_s: f64,
    best: Option<Value>,
    key: fn(&Value) -> f64,
}

impl RelaxedPlan<'_> {
    fn optimum(chain: &Chain, limit_s: f64, key: fn(&Value) -> f64) -> Option<Value> {
        let mut twin = RelaxedPlan { chain, limit_s, best: None, key };
        let free: Vec<usize> = chain.types.iter().map(|host| host.hosts).collect();
        twin.extend(0, None, &free, Value { interval_s: 0.0, latency_s: 0.0, hosts: 0, bits_lost: 0 });
        twin.best
    }

    /// Seconds and bits of a hop that keeps within the limit, with as many bits as possible.
    fn hop(
        &self,
        position: usize,
        from: Option<(usize, usize)>,
        to: Option<(usize, usize)>,
    ) -> Option<(f64, f64, u32)> {
        let free = Hop::FREE;
        let (link, widths, lanes) = match (from, to) {
            (Some(from), Some(to)) => (&self.chain.links[from.0][to.0], &self.chain.bits[..], from.1.min(to.1)),
            (None, Some(to)) => (self.chain.input.get(to.0).unwrap_or(&free), &self.chain.bits[..1], to.1),
            (Some(from), None) => (self.chain.output.get(from.0).unwrap_or(&free), &self.chain.bits[..1], from.1),
            (None, None) => unreachable!(),
        };
        widths.iter().find_map(|&bits| {
            let bytes = self.chain.cut_bytes[position] * f64::from(bits) / f64::from(self.chain.bits[0]);
            let seconds = link.latency_s + if bytes > 0.0 { bytes / link.bytes_per_s } else { 0.0 };
            let interval_s = seconds / lanes as f64;
            (interval_s <= self.limit_s).then_some((seconds, interval_s, self.chain.bits[0] - bits))
        })
    }

    fn need(&self, first: usize, end: usize) -> f64 {
        let waiting = if first > 0 { self.chain.buffers_in } else { 0 };
        self.chain.layer_bytes[first..end].iter().sum::<f64>()
            + self.chain.cut_bytes[first] * f64::from(1 + waiting)
            + self.chain.cut_bytes[end] * f64::from(1 + self.chain.buffers_out)
    }

    fn extend(&mut self, first: usize, from: Option<(usize, usize)>, free: &[usize], so_far: Value) {
        let layers = self.chain.layer_bytes.len();
        if first == layers {
            let Some((seconds, interval_s, _)) = self.hop(first, from, None) else { return };
            let value = Value {
                interval_s: so_far.interval_s.max(interval_s),
                latency_s: so_far.latency_s + seconds,
                ..so_far
            };
            if self.best.is_none_or(|best| (self.key)(&value) < (self.key)(&best)) {
                self.best = Some(value);
            }
            return;
        }
        for kind in 0..free.len() {
            let host = &self.chain.types[kind];
            for replicas in 1..=free[kind].min(self.chain.max_replicas) {
                let Some((hop_s, hop_interval_s, lost)) = self.hop(first, from, Some((kind, replicas))) else {
                    continue;
                };
                let mut left = free.to_vec();
                left[kind] -= replicas;
                for end in first + 1..=layers {
                    let compute_s = host.time_s[first..end].iter().sum::<f64>();
                    let allowed = host.may_run.is_empty() || host.may_run[first..end].iter().all(|&may| may);
                    let interval_s = compute_s / replicas as f64;
                    if !allowed || interval_s > self.limit_s || host.memory_bytes <= self.need(first, end) {
                        continue;
                    }
                    let value = Value {
                        interval_s: so_far.interval_s.max(interval_s).max(hop_interval_s),
                        latency_s: so_far.latency_s + compute_s + hop_s,
                        hosts: so_far.hosts + replicas,
                        bits_lost: so_far.bits_lost + lost,
                    };
                    self.extend(end, Some((kind, replicas)), &left, value);
                }
            }
        }
    }
}

/// Whole numbers, so that ties and exactly full memories happen and no sum rounds.
fn numbers(size: usize, range: std::ops::Range<u32>) -> impl Strategy<Value = Vec<f64>> {
    prop::collection::vec(range.prop_map(f64::from), size)
}

fn hops(size: usize) -> impl Strategy<Value = Vec<Hop>> {
    let hop = (0..6_u32, 0..3_u32)
        .prop_map(|(rate, latency)| Hop { bytes_per_s: f64::from(rate), latency_s: f64::from(latency) });
    prop::collection::vec(hop, size)
}

fn host(layers: usize) -> impl Strategy<Value = HostType> {
    let allowed = prop_oneof![3 => Just(Vec::new()), 1 => prop::collection::vec(prop::bool::weighted(0.8), layers)];
    (1..4_usize, 5..60_u32, numbers(layers, 0..9), allowed).prop_map(|(hosts, memory, time_s, may_run)| HostType {
        may_run,
        ..HostType::new("host", hosts, f64::from(memory), time_s)
    })
}

fn chains() -> impl Strategy<Value = Chain> {
    (1..7_usize, 1..4_usize)
        .prop_flat_map(|(layers, kinds)| {
            (
                numbers(layers, 0..9),
                numbers(layers + 1, 0..7),
                prop::collection::vec(host(layers), kinds),
                prop_oneof![Just(vec![vec![Hop::FREE; kinds]; kinds]), prop::collection::vec(hops(kinds), kinds)],
                prop_oneof![2 => Just(Vec::new()), 1 => hops(kinds)],
                prop_oneof![2 => Just(Vec::new()), 1 => hops(kinds)],
                (0..3_u32, 0..3_u32),
                1..3_usize,
            )
        })
        .prop_map(|(layer_bytes, cut_bytes, mut types, links, input, output, buffers, max_replicas)| {
            // At most five hosts in all, or the twin takes too long.
            let mut room = 5;
            for host in &mut types {
                host.hosts = host.hosts.min(room);
                room -= host.hosts;
            }
            Chain {
                links,
                input,
                output,
                buffers_in: buffers.0,
                buffers_out: buffers.1,
                max_replicas,
                ..Chain::new(layer_bytes, cut_bytes, types)
            }
        })
}

/// The plan keeps to the host counts, memories and permissions, and its figures are those of its stages and hops.
fn assert_sound(chain: &Chain, plan: &ChainPlan) -> std::result::Result<(), TestCaseError> {
    let mut free: Vec<usize> = chain.types.iter().map(|host| host.hosts).collect();
    let mut at = 0;
    for stage in &plan.stages {
        let host = &chain.types[stage.host_type];
        prop_assert_eq!(stage.first, at);
        prop_assert!(stage.end > at && stage.replicas >= 1 && stage.replicas <= chain.max_replicas);
        prop_assert!(free[stage.host_type] >= stage.replicas, "more hosts used than there are");
        free[stage.host_type] -= stage.replicas;
        prop_assert!(host.memory_bytes > stage.memory_bytes, "over memory");
        prop_assert!(host.may_run.is_empty() || host.may_run[at..stage.end].iter().all(|&may| may));
        at = stage.end;
    }
    prop_assert_eq!(at, chain.layer_bytes.len());
    prop_assert_eq!(plan.hops.len(), plan.stages.len() + 1);
    let slowest = plan.stages.iter().map(|stage| stage.interval_s).chain(plan.hops.iter().map(|hop| hop.interval_s));
    prop_assert!((plan.interval_s - slowest.fold(0.0, f64::max)).abs() <= 1e-12 * plan.interval_s);
    Ok(())
}

fn agrees(
    chain: &Chain,
    objective: Objective,
    limit_s: Option<f64>,
    key: fn(&Value) -> f64,
) -> std::result::Result<(), TestCaseError> {
    let best = RelaxedPlan::optimum(chain, limit_s.unwrap_or(f64::MAX), key);
    match (partition(chain, objective, limit_s, &Control::default()), best) {
        (Ok(plan), Some(best)) => {
            assert_sound(chain, &plan)?;
            prop_assert!((plan.value - key(&best)).abs() <= 1e-9 * plan.value, "{} against {}", plan.value, key(&best));
            prop_assert!(plan.lower_bound >= plan.value * (1.0 - 2e-9), "not proven: {}", plan.lower_bound);
            prop_assert!(plan.interval_s <= limit_s.unwrap_or(f64::INFINITY));
        }
        (Err(Error::Infeasible { message, hint }), None) => prop_assert!(!message.is_empty() && !hint.is_empty()),
        (plan, best) => prop_assert!(false, "{plan:?} where the twin has {:?}", best.map(|best| key(&best))),
    }
    Ok(())
}

/// A chain that takes minutes: 2,000 layers on 200 hosts, no two alike.
fn long_chain() -> Chain {
    let layers = 2_000;
    let host = |number: usize| {
        let time_s = (0..layers).map(|layer| 1.0 + ((layer * 31 + number * 17) % 23) as f64 / 10.0).collect();
        HostType::new(&format!("host {number}"), 1, 1e9, time_s)
    };
    Chain::new(vec![1e6; layers], vec![1e3; layers + 1], (0..200).map(host).collect())
}

#[test]
fn whoever_stops_a_long_search_gets_a_plan_or_nothing_and_no_false_reason() {
    let chain = long_chain();
    // Latency sees every layer from every layer; the interval is out of reach, and finding out why takes long, too.
    for (objective, limit_s) in [(Objective::Latency, None), (Objective::Throughput, Some(5.0))] {
        let control = Control::default();
        std::thread::scope(|scope| {
            let search = scope.spawn(|| partition(&chain, objective, limit_s, &control));
            std::thread::sleep(std::time::Duration::from_millis(100));
            control.cancel();
            let answer = search.join().expect("searches don't panic");
            assert!(matches!(answer, Ok(_) | Err(Error::Cancelled)), "{objective:?}: {answer:?}");
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5000, ..ProptestConfig::default() })]

    #[test]
    fn throughput_equals_exhaustive_search(chain in chains()) {
        agrees(&chain, Objective::Throughput, None, |value| value.interval_s)?;
    }

    #[test]
    fn latency_equals_exhaustive_search(chain in chains(), limit in prop::option::of(1..30_u32)) {
        agrees(&chain, Objective::Latency, limit.map(f64::from), |value| value.latency_s)?;
    }

    #[test]
    fn fewest_hosts_equal_exhaustive_search(chain in chains(), limit in 1..30_u32) {
        agrees(&chain, Objective::Hosts, Some(f64::from(limit)), |value| value.hosts as f64)?;
    }

    #[test]
    fn fewest_bits_lost_equal_exhaustive_search(chain in chains(), limit in 1..20_u32, widths in 1..4_usize) {
        let chain = Chain { bits: [32, 16, 8, 4][..=widths].to_vec(), ..chain };
        agrees(&chain, Objective::Bits, Some(f64::from(limit)), |value| f64::from(value.bits_lost))?;
    }
}
