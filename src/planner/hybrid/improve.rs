//! Small steps from a good plan to a better one, each judged by simulation.

use super::Effort;
use super::price::{Candidate, Pricer};
use crate::control::Control;
use crate::cost::Model;

/// Stages of which all warm-ups are tried: 256 plans.
const MOST_PATTERNS: usize = 8;

/// A plan with which of its stages run ahead farther than they must.
type Neighbour = (Candidate, Vec<bool>);

/// The best plan that small steps lead to: one cut, one device, or one stage's warm-up at a time.
pub(super) fn improve(
    model: &Model,
    pricer: &mut Pricer<'_>,
    start: (f64, Candidate),
    effort: Effort,
    control: &Control,
) -> (f64, Candidate) {
    climb(pricer, start, effort, control, |plan, eager| {
        let mut plans = shifts(model, plan, eager);
        plans.extend(warm_ups(plan, eager));
        plans
    })
}

/// The better of `best` and a plan with the stages of `plan`, of which some run ahead: of a few stages the best of all
/// such plans, of more the one that changing one stage's warm-up at a time leads to.
pub(super) fn improve_warm_ups(
    pricer: &mut Pricer<'_>,
    best: (f64, Candidate),
    plan: &(f64, Candidate),
    effort: Effort,
    control: &Control,
) -> (f64, Candidate) {
    let count = plan.1.stages.len();
    if count > MOST_PATTERNS {
        let found = climb(pricer, plan.clone(), effort, control, warm_ups);
        return if found.0 < best.0 { found } else { best };
    }
    let mut best = best;
    let mut tried: Vec<Vec<u32>> = Vec::new();
    let until = pricer.actions + effort.actions;
    for pattern in 0..1_u32 << count {
        if pricer.actions >= until || control.should_stop() {
            break;
        }
        let eager: Vec<bool> = (0..count).map(|stage| pattern >> stage & 1 == 1).collect();
        let Ok(Some(windows)) = pricer.windows(&plan.1, &eager) else { continue };
        if tried.contains(&windows) {
            continue;
        }
        let mut other = plan.1.clone();
        other.stages.iter_mut().zip(&windows).for_each(|(stage, &window)| stage.window = window);
        tried.push(windows);
        // Below this difference two sums of the same times differ by rounding alone.
        let limit_s = best.0 * (1.0 - 1e-12);
        if pricer.path_s(&other).is_ok_and(|path_s| path_s < limit_s)
            && let Ok(priced) = pricer.price(&other)
            && priced.step_s < limit_s
        {
            best = (priced.step_s, other);
        }
    }
    best
}

/// Takes the best of all neighbours until none helps or that took enough effort.
fn climb(
    pricer: &mut Pricer<'_>,
    start: (f64, Candidate),
    effort: Effort,
    control: &Control,
    neighbours: impl Fn(&Candidate, &[bool]) -> Vec<Neighbour>,
) -> (f64, Candidate) {
    let (limit, until) = (pricer.simulated + effort.improved, pricer.actions + effort.actions);
    let mut best = start;
    loop {
        let mut better: Option<(f64, Candidate)> = None;
        let eager = pricer.eager(&best.1);
        for (mut plan, eager) in neighbours(&best.1, &eager) {
            if pricer.simulated >= limit || pricer.actions >= until || control.should_stop() {
                break;
            }
            let Ok(Some(windows)) = pricer.windows(&plan, &eager) else { continue };
            plan.stages.iter_mut().zip(windows).for_each(|(stage, window)| stage.window = window);
            let Ok(priced) = pricer.price(&plan) else { continue };
            let least_s = better.as_ref().map_or(best.0, |(step_s, _)| *step_s);
            // Below this difference two sums of the same times differ by rounding alone.
            if priced.step_s < least_s * (1.0 - 1e-12) {
                better = Some((priced.step_s, plan));
            }
        }
        match better {
            Some(found) => best = found,
            None => return best,
        }
    }
}

/// Plans in which one stage's warm-up differs.
fn warm_ups(plan: &Candidate, eager: &[bool]) -> Vec<Neighbour> {
    let other = |index: usize| {
        let mut eager = eager.to_vec();
        eager[index] = !eager[index];
        (plan.clone(), eager)
    };
    (0..plan.stages.len()).map(other).collect()
}

/// Plans that differ in one cut or one device.
fn shifts(model: &Model, plan: &Candidate, eager: &[bool]) -> Vec<Neighbour> {
    let mut plans = Vec::new();
    let mut with = |change: &dyn Fn(&mut Candidate)| {
        let mut other = plan.clone();
        change(&mut other);
        plans.push((other, eager.to_vec()));
    };
    let nested = |begin: usize, end: usize| model.is_inside(begin, end);
    for border in 1..plan.stages.len() {
        let (before, after) = (&plan.stages[border - 1], &plan.stages[border]);
        for distance in [1_usize, 2] {
            for cut in [after.begin.wrapping_sub(distance), after.begin + distance] {
                if cut > before.begin && cut < after.end && nested(before.begin, cut) && nested(cut, after.end) {
                    with(&|other| {
                        other.stages[border - 1].end = cut;
                        other.stages[border].begin = cut;
                    });
                }
            }
        }
        // One device changes sides, if the stage it leaves keeps another.
        for (from, to) in [(border - 1, border), (border, border - 1)] {
            for &(machine, _) in &plan.stages[from].footprint {
                if plan.stages[from].replicas() > 1 {
                    with(&|other| {
                        add(&mut other.stages[from].footprint, machine, -1);
                        add(&mut other.stages[to].footprint, machine, 1);
                    });
                }
            }
        }
    }
    plans
}

fn add(footprint: &mut Vec<(u32, u32)>, machine: u32, devices: i32) {
    match footprint.iter_mut().find(|(other, _)| *other == machine) {
        Some((_, count)) => *count = count.saturating_add_signed(devices),
        None => footprint.push((machine, 1)),
    }
    footprint.retain(|&(_, count)| count > 0);
    footprint.sort_unstable();
}
