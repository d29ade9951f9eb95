// Suggestions for a name that is not known.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace sluice {

// Returns " (did you mean NAME?)" for the candidate with the fewest edits to `name`, or "" if even
// that one shares too little with it.
std::string DidYouMean(std::string_view name, std::span<const std::string> candidates);

}  // namespace sluice
