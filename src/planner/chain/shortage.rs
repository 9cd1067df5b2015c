//! Explanations why no plan fits, with the smallest change that would help.

use std::time::Duration;

use super::cost::{Costs, exact};
use super::problem::{Chain, Hop, HostType};
use super::{relaxed, search};
use crate::control::Control;
use crate::error::Error;

/// Returns the reason why there is certainly no plan, with any cuts, if that shows without a search.
///
/// The reasons are: no hosts; a layer that no host may run or hold; too little memory for all layers; a layer that
/// alone takes longer than `max_interval_s`.
pub(super) fn certain(costs: &Costs<'_>, max_interval_s: Option<f64>) -> Option<Error> {
    let chain = costs.chain;
    if chain.types.iter().all(|host| host.hosts == 0) {
        return Some(Error::infeasible("there are no hosts", "name at least one host that may be used"));
    }
    let needs = costs.min_needs();
    if let Some(error) = needs.into_iter().enumerate().find_map(|(layer, need)| fits_no_host(costs, layer, need)) {
        return Some(error);
    }
    if let Some(error) = too_small(costs) {
        return Some(error);
    }
    let limit_s = max_interval_s?;
    let (layer, alone_s) = relaxed::slowest_layer(chain);
    (alone_s > limit_s).then(|| {
        Error::infeasible(
            format!(
                "{} alone takes {alone_s:.6} s on its fastest hosts, but a batch must pass every \
                 {limit_s:.6} s: too slow by {:.6} s",
                chain.name(layer),
                alone_s - limit_s
            ),
            "reduce the throughput, split the layer, or let several hosts share a stage",
        )
    })
}

/// Returns an error if no stage can hold `layer`. Any stage with it needs at least `need` units of memory.
fn fits_no_host(costs: &Costs<'_>, layer: usize, need: i128) -> Option<Error> {
    let chain = costs.chain;
    let types = chain.types.iter().zip(&costs.memory);
    let types = types.filter(|(host, _)| host.hosts > 0 && relaxed::may_run(chain, host, layer));
    let Some((host, &has)) = types.max_by_key(|(_, memory)| **memory) else {
        return Some(Error::infeasible(
            format!("{} may not run on any host", chain.name(layer)),
            "remove one of its pins and exclusions, which contradict each other",
        ));
    };
    let buffers = if chain.is_restricted { "" } else { " with its buffers, in any stage" };
    (need >= has).then(|| {
        Error::infeasible(
            format!(
                "{} needs more than {}{buffers}, but the largest host that may run it, `{}`, has {}: short by {}",
                chain.name(layer),
                mebibytes(need),
                host.name,
                mebibytes(has),
                mebibytes(need - has),
            ),
            "use a host with more memory, fewer buffers, or a smaller batch",
        )
    })
}

/// Returns an error if the hosts have too little memory for all layers, in any distribution.
fn too_small(costs: &Costs<'_>) -> Option<Error> {
    let (layers, hosts, buffers) = (costs.all_held(), costs.all_memory(0), costs.min_buffers());
    // Every host that is used needs some buffers, so their minimum is subtracted from each.
    let beside = costs.all_memory(buffers);
    if layers < beside {
        return None;
    }
    let (what, has) = if layers >= hosts {
        ("all hosts together have".to_owned(), hosts)
    } else {
        (format!("beside {} or more of buffers on each, all hosts together have", mebibytes(buffers)), beside)
    };
    let types = costs.chain.types.iter().zip(&costs.memory).filter(|(host, _)| host.hosts > 0);
    let (host, &largest) = types.max_by_key(|(_, memory)| **memory)?;
    let hint = if largest > buffers {
        // The hint is a promise only if a fast search confirms it. Otherwise it states a minimum.
        let more = (layers - beside) / (largest - buffers) + 1;
        let hosts = format!("{more} more host{} like `{}`", if more == 1 { "" } else { "s" }, host.name);
        let is_enough = is_quickly_enough(costs.chain, &host.name, more);
        if is_enough {
            format!("{hosts} would do, or more memory")
        } else {
            format!("use at least {hosts}, or more memory")
        }
    } else {
        "use hosts with more memory, fewer buffers, or a smaller batch".to_owned()
    };
    Some(Error::infeasible(
        format!(
            "the layers alone need {}, but {what} {}: short by {}",
            mebibytes(layers),
            mebibytes(has),
            mebibytes(layers - has)
        ),
        hint,
    ))
}

/// Returns whether a fast search finds a plan with `more` additional hosts of the first type called `name`.
fn is_quickly_enough(chain: &Chain, name: &str, more: i128) -> bool {
    // Short, so that the hint does not delay the error noticeably.
    let control = Control::with_deadline(Some(Duration::from_millis(50)));
    let mut larger = chain.clone();
    let kind = larger.types.iter_mut().find(|host| host.hosts > 0 && host.name == name);
    let (Some(kind), Ok(more)) = (kind, usize::try_from(more)) else { return false };
    kind.hosts = kind.hosts.saturating_add(more);
    kind.hosts <= 1_000
        && Costs::new(&larger, &control).is_some_and(|costs| search::is_possible(&costs, &control) == Some(true))
}

/// Returns the error for a problem without a plan, as a search of these cuts has found.
pub(super) fn explain(costs: &Costs<'_>, max_interval_s: Option<f64>, control: &Control) -> Error {
    reason(costs, max_interval_s, control).unwrap_or_else(|| {
        if control.is_cancelled() {
            return Error::Cancelled;
        }
        Error::infeasible(
            format!("{}, but time was up before it was known what is short", no_plan(costs.chain)),
            "give it more time",
        )
    })
}

/// Returns how certain it is that there is no plan, as the begin of a message.
fn no_plan(chain: &Chain) -> &'static str {
    if chain.is_restricted { "no plan was found with the searched cuts, which are not all" } else { "no plan fits" }
}

/// Finds a change with which there is a plan, and returns the error that names it. `None` if it was stopped.
///
/// Each constraint is lifted alone, and is named if there is a plan without it.
fn reason(costs: &Costs<'_>, max_interval_s: Option<f64>, control: &Control) -> Option<Error> {
    let chain = costs.chain;
    // First the throughput limit: without it, the shortest interval is the best hint.
    if let (Some(limit_s), search::Answer::Plan { path, value, lower_bound, .. }) =
        (max_interval_s, search::fastest(costs, f64::MAX, None, control))
    {
        let best_s = costs.bottleneck_s(&path, value);
        let is_sure = lower_bound > limit_s && !chain.is_restricted;
        let (sure, found) = if is_sure { ("no plan passes", "") } else { ("no plan was found that passes", " found") };
        return Some(Error::infeasible(
            format!("{sure} on a batch every {limit_s:.6} s: the shortest interval{found} is {best_s:.6} s"),
            format!("ask for no more than one batch every {best_s:.6} s, or add hosts"),
        ));
    }
    let fits = |chain: &Chain| match Costs::new(chain, control) {
        Some(costs) => search::is_possible(&costs, control),
        None => None,
    };
    let with_memory = |factor: f64| {
        let types = chain.types.iter();
        let types = types.map(|host| HostType { memory_bytes: host.memory_bytes * factor, ..host.clone() }).collect();
        Chain { types, ..chain.clone() }
    };
    let everywhere = |chain: &Chain| {
        let types = chain.types.iter();
        let types = types.map(|host| HostType { may_run: Vec::new(), ..host.clone() }).collect();
        Chain { types, ..chain.clone() }
    };
    let linked = |chain: &Chain| {
        let kinds = chain.types.len();
        let links = vec![vec![Hop::FREE; kinds]; kinds];
        Chain { links, input: Vec::new(), output: Vec::new(), ..chain.clone() }
    };
    let no_plan = no_plan(chain);
    let has_rules = chain.types.iter().any(|host| !host.may_run.is_empty());
    // With unlimited memory, only links and permissions can prevent a plan.
    let never_full = with_memory(f64::INFINITY);
    if !fits(&never_full)? {
        let (rules, links) = (has_rules && fits(&everywhere(&never_full))?, fits(&linked(&never_full))?);
        let (what, hint) = match (rules, links) {
            (true, false) => ("pins and exclusions leave", "lift a pin or an exclusion"),
            (false, true) => ("links leave", "add a link"),
            (true, true) => {
                ("links leave, with these pins and exclusions,", "add a link, or lift a pin or an exclusion")
            }
            (false, false) => {
                ("hosts, links, pins and exclusions leave", "add hosts and links, or lift pins and exclusions")
            }
        };
        return Some(Error::infeasible(
            format!("{no_plan}: {what} no way from the first layer to the last, even with unlimited memory"),
            hint,
        ));
    }
    // Doubling, then bisection to 1 %: `enough` is a sufficient factor, and no plan was found with `short`.
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
        mebibytes(exact(largest * (enough - 1.0)))
    );
    let mut fewest: Option<(usize, &str)> = None;
    'types: for (kind, host) in chain.types.iter().enumerate().filter(|(_, host)| host.hosts > 0) {
        // Each type is tried only with fewer additional hosts than the best hint so far.
        let max = fewest.map_or(costs.last, |(extra, _)| extra - 1);
        for extra in 1..=max.min(64) {
            let mut larger = chain.clone();
            larger.types[kind].hosts += extra;
            let Some(is_enough) = fits(&larger) else { break 'types };
            if is_enough {
                fewest = Some((extra, &host.name));
                break;
            }
        }
    }
    let mut helps = Vec::new();
    if let Some((extra, name)) = fewest {
        helps.push(format!("{extra} more host{} like `{name}`", if extra == 1 { "" } else { "s" }));
    }
    if has_rules && fits(&everywhere(chain)) == Some(true) {
        helps.push("no pins and exclusions".to_owned());
    }
    let has_buffers = chain.buffers_in + chain.buffers_out > 0;
    if has_buffers && fits(&Chain { buffers_in: 0, buffers_out: 0, ..chain.clone() }) == Some(true) {
        helps.push("no batches that wait (0 buffers in and out)".to_owned());
    }
    helps.push(more);
    let with = if has_rules { "with buffers, pins and exclusions" } else { "with buffers" };
    Some(Error::infeasible(
        format!(
            "{no_plan}: the hosts have {} in all for {} of layers, but {with} they are short of memory",
            mebibytes(costs.all_memory(0)),
            mebibytes(costs.all_held())
        ),
        format!("{} would do", helps.join(", or ")),
    ))
}

/// Formats memory, given in units of 1/1024 byte, in MiB.
fn mebibytes(units: i128) -> String {
    format!("{:.1} MiB", units as f64 / 1_073_741_824.0)
}
