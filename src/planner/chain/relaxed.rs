//! What holds for all cuts of a model, whichever positions are searched: from sums over its layers alone.

use super::problem::{Chain, HostType, Objective};

/// No plan has a smaller value, wherever it cuts. Hosts and bits are whole numbers.
///
/// Throughput: each layer takes its time on some host, and the hosts share all of them (see [`work_s`]). Latency: each
/// layer on the host that is best at it. Hosts: as many as can do the work within `limit_s` and hold the layers.
pub(super) fn bound(chain: &Chain, objective: Objective, limit_s: f64) -> f64 {
    match objective {
        Objective::Throughput => slowest_layer(chain).1.max(work_s(chain)),
        Objective::Latency => (0..chain.layer_bytes.len()).map(|layer| min_s(chain, layer, 1)).sum(),
        Objective::Hosts => {
            let mut speeds = weights(chain);
            speeds.sort_by(|one, other| other.0.total_cmp(&one.0));
            let by_work = fewest(speeds.iter().map(|(weight, hosts)| (weight * limit_s, *hosts)), weighted_s(chain));
            let types = chain.types.iter().filter(|host| host.hosts > 0);
            let mut memory: Vec<(f64, usize)> = types.map(|host| (host.memory_bytes, host.hosts)).collect();
            memory.sort_by(|one, other| other.0.total_cmp(&one.0));
            by_work.max(fewest(memory.into_iter(), chain.layer_bytes.iter().sum())).max(1.0)
        }
        Objective::Bits => 0.0,
    }
}

/// The layer that takes longest where it is fastest, from 0, and its interval there in seconds.
pub(super) fn slowest_layer(chain: &Chain) -> (usize, f64) {
    let intervals = (0..chain.layer_bytes.len()).map(|layer| min_s(chain, layer, chain.max_replicas));
    intervals.enumerate().fold((0, 0.0), |slowest, next| if next.1 > slowest.1 { next } else { slowest })
}

/// The least interval of a layer on `replicas` hosts at most of a type that may run it.
fn min_s(chain: &Chain, layer: usize, replicas: usize) -> f64 {
    let types = chain.types.iter().filter(|host| host.hosts > 0 && may_run(chain, host, layer));
    types.map(|host| host.time_s[layer] / host.hosts.min(replicas) as f64).fold(f64::INFINITY, f64::min)
}

/// Whether a host may run a layer. With other cuts than the model's a host may take what is joined to such a layer.
pub(super) fn may_run(chain: &Chain, host: &HostType, layer: usize) -> bool {
    chain.is_restricted || host.may_run.is_empty() || host.may_run[layer]
}

/// What the hosts need at least if each could take any part of any layer, in seconds.
///
/// For weights `w` of hosts that add up to 1, `T = Σ w T ≥ Σ w · (its layers' time)`, and each layer adds the least
/// `w · time` of all hosts at least. Weights in proportion to speed are the best where hosts differ by a factor.
pub(super) fn work_s(chain: &Chain) -> f64 {
    let total: f64 = weights(chain).iter().map(|&(weight, hosts)| weight * hosts as f64).sum();
    if total > 0.0 { weighted_s(chain) / total } else { 0.0 }
}

/// Weight and number of the hosts of each type: the inverse of the time that one takes for all layers.
fn weights(chain: &Chain) -> Vec<(f64, usize)> {
    let weight = |time_s: &[f64]| 1.0 / time_s.iter().sum::<f64>().max(1e-300);
    chain.types.iter().filter(|host| host.hosts > 0).map(|host| (weight(&host.time_s), host.hosts)).collect()
}

fn weighted_s(chain: &Chain) -> f64 {
    let weights = weights(chain);
    let used: Vec<&HostType> = chain.types.iter().filter(|host| host.hosts > 0).collect();
    let least = |layer: usize| {
        let types = used.iter().zip(&weights).filter(|(host, _)| may_run(chain, host, layer));
        types.map(|(host, (weight, _))| weight * host.time_s[layer]).fold(f64::INFINITY, f64::min)
    };
    (0..chain.layer_bytes.len()).map(least).sum()
}

/// How many of these, largest first, add up to `needed`; one more than all where they don't.
fn fewest(sizes: impl Iterator<Item = (f64, usize)>, needed: f64) -> f64 {
    let (mut taken, mut left) = (0.0, needed * (1.0 - 1e-9));
    for (size, hosts) in sizes.map(|(size, hosts)| (size, hosts as f64)) {
        if left <= size * hosts {
            return taken + (left / size).ceil().max(0.0);
        }
        (taken, left) = (taken + hosts, left - size * hosts);
    }
    taken + f64::from(left > 0.0)
}
