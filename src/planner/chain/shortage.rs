//! Why nothing fits, and the nearest change that would help.

use super::cost::Costs;
use super::question::{Chain, HostType};
use super::search;
use crate::control::Control;
use crate::error::Error;

/// The error for a question that has no plan.
pub(super) fn explain(chain: &Chain, max_interval_s: Option<f64>, control: &Control) -> Error {
    reason(chain, max_interval_s, control).unwrap_or_else(|| {
        if control.is_cancelled() {
            return Error::Cancelled;
        }
        Error::infeasible("there is no plan, but time was up before it was known what is short", "give it more time")
    })
}

/// The first of these that holds, with numbers; `None` if it was stopped.
///
/// No hosts; a layer that no host can take alone; an interval that is too short; too little memory in all; too little
/// memory on each; no way over the links.
fn reason(chain: &Chain, max_interval_s: Option<f64>, control: &Control) -> Option<Error> {
    if chain.types.iter().all(|host| host.hosts == 0) {
        return Some(Error::infeasible("there are no hosts", "name at least one host that may be used"));
    }
    let costs = Costs::new(chain);
    if let Some(error) = (0..costs.layers).find_map(|layer| homeless(&costs, layer, max_interval_s)) {
        return Some(error);
    }
    if let (Some(limit_s), search::Answer::Plan { path, value, lower_bound, .. }) =
        (max_interval_s, search::fastest(&costs, f64::MAX, control))
    {
        let best_s = costs.bottleneck_s(&path, value);
        let sure = if lower_bound > limit_s { "" } else { " found" };
        return Some(Error::infeasible(
            format!("no plan passes on a batch every {limit_s:.6} s: the shortest interval{sure} is {best_s:.6} s"),
            format!("ask for no more than one batch every {best_s:.6} s, or add hosts"),
        ));
    }
    memory(chain, &costs, control)
}

/// Says why `layer` can't even be a stage of its own, if that is so.
fn homeless(costs: &Costs<'_>, layer: usize, max_interval_s: Option<f64>) -> Option<Error> {
    let chain = costs.chain;
    let crews = || 0..costs.crews.len();
    let allowed = |crew: &usize| costs.may_run(*crew, layer, layer + 1);
    let name = |crew: usize| &chain.types[costs.crews[crew].kind].name;
    let number = layer + 1;
    if !crews().any(|crew| allowed(&crew)) {
        return Some(Error::infeasible(
            format!("layer {number} may not run on any host"),
            "its pins and exclusions contradict each other: lift one",
        ));
    }
    if !crews().filter(allowed).any(|crew| costs.fits(crew, layer, layer + 1)) {
        let memory = |crew: &usize| chain.types[costs.crews[*crew].kind].memory_bytes;
        let crew = crews().filter(allowed).max_by(|one, other| memory(one).total_cmp(&memory(other)))?;
        let (need, has) = (costs.memory_bytes(layer, layer + 1), memory(&crew));
        return Some(Error::infeasible(
            format!(
                "layer {number} needs more than {} with its buffers, but the largest host that may run it, `{}`, has {}: \
                 short by {}",
                mebibytes(need),
                name(crew),
                mebibytes(has),
                mebibytes(need - has),
            ),
            "use a host with more memory, fewer buffers, or a smaller batch",
        ));
    }
    let limit_s = max_interval_s?;
    let fitting = crews().filter(allowed).filter(|&crew| costs.fits(crew, layer, layer + 1));
    let (crew, best_s) = fitting
        .map(|crew| (crew, costs.interval_s(crew, layer, layer + 1)))
        .min_by(|one, other| one.1.total_cmp(&other.1))?;
    (best_s > limit_s).then(|| {
        Error::infeasible(
            format!(
                "layer {number} alone takes {best_s:.6} s on `{}`, the host that is best at it, but a batch is to pass \
                 every {limit_s:.6} s: too slow by {:.6} s",
                name(crew),
                best_s - limit_s
            ),
            "ask for less throughput, split the layer, or let several hosts share a stage",
        )
    })
}

/// Says how much memory is short, and which change would do; `None` if it was stopped.
fn memory(chain: &Chain, costs: &Costs<'_>, control: &Control) -> Option<Error> {
    let fits = |chain: &Chain| search::is_possible(&Costs::new(chain), control);
    let with_memory = |factor: f64| {
        let types = chain.types.iter();
        let types = types.map(|host| HostType { memory_bytes: host.memory_bytes * factor, ..host.clone() }).collect();
        Chain { types, ..chain.clone() }
    };
    if !fits(&with_memory(f64::INFINITY))? {
        return Some(Error::infeasible(
            "no row of hosts is possible: links, pins and exclusions leave no way from the first layer to the last",
            "add a link, or lift a pin or an exclusion",
        ));
    }
    let layers: f64 = chain.layer_bytes.iter().sum();
    let hosts: f64 = chain.types.iter().map(|host| host.hosts as f64 * host.memory_bytes).sum();
    // Doubling, then halving: the factor is enough, and 1 % less was not found to be.
    let (mut short, mut enough) = (1.0, 2.0);
    while !fits(&with_memory(enough))? && enough < 1e9 {
        (short, enough) = (enough, enough * 2.0);
    }
    while enough - short > 0.01 * short {
        let middle = f64::midpoint(short, enough);
        if fits(&with_memory(middle))? { enough = middle } else { short = middle }
    }
    let largest = chain.types.iter().map(|host| host.memory_bytes).fold(0.0, f64::max);
    let more = format!(
        "{:.0} % more memory on every host ({} on the largest)",
        (100.0 * (enough - 1.0)).ceil(),
        mebibytes(largest * (enough - 1.0))
    );
    let message = if layers >= hosts {
        format!(
            "the layers alone need {}, but all hosts together have {}: short by {}",
            mebibytes(layers),
            mebibytes(hosts),
            mebibytes(layers - hosts)
        )
    } else {
        format!(
            "the hosts are short of memory: {} in all for {} of layers, but with buffers, pins and exclusions no cut \
             fits; it would take {more}",
            mebibytes(hosts),
            mebibytes(layers)
        )
    };
    let mut fewest: Option<(usize, &str)> = None;
    'types: for (kind, host) in chain.types.iter().enumerate().filter(|(_, host)| host.hosts > 0) {
        let most = fewest.map_or(costs.layers, |(extra, _)| extra - 1);
        for extra in 1..=most.min(64) {
            let mut larger = chain.clone();
            larger.types[kind].hosts += extra;
            let Some(is_enough) = fits(&larger) else { break 'types };
            if is_enough {
                fewest = Some((extra, &host.name));
                break;
            }
        }
    }
    let hint = match fewest {
        Some((extra, name)) => {
            format!("{extra} more host{} like `{name}` would do, or {more}", if extra == 1 { "" } else { "s" })
        }
        None => format!("{more} would do; so may fewer buffers or a smaller batch"),
    };
    Some(Error::infeasible(message, hint))
}

fn mebibytes(bytes: f64) -> String {
    format!("{:.1} MiB", bytes / 1_048_576.0)
}
