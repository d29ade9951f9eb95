// What a program says about itself, all of it taken from the schema.
#pragma once

#include <string>
#include <string_view>

namespace sluice {

// Usage, every flag of `program` with its default and meaning, the rules of environment and file,
// and examples; at most 100 columns wide.
std::string HelpText(std::string_view program);

// "sluice-server 0.1.0".
std::string VersionText(std::string_view program);

// The configuration table of README.md, which a test holds to it: one line per setting.
std::string ConfigTableMarkdown();

}  // namespace sluice
