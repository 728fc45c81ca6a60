// Vercel's AI SDK: `responses` (stored: references), `sealed` (nothing stored) or `messages`; behind it `stream` or nothing.
import { execFileSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { generateText, jsonSchema, stepCountIs, streamText } from 'ai';
import { openai } from '@ai-sdk/openai';
import { anthropic } from '@ai-sdk/anthropic';

const [endpoint, how] = process.argv.slice(2);
const system = process.env.SYSTEM || 'You are a careful agent. Use the tool for every step.';
const properties = { step: { type: 'string' } };
const run_step = {
  description: 'Run one step.',
  inputSchema: jsonSchema({ type: 'object', properties, required: ['step'] }),
  execute: ({ step }) => execFileSync('python3', ['step.py', step], { encoding: 'utf8' }),
};
const model = endpoint === 'messages' ? anthropic('claude-sonnet-4-5') : openai('gpt-5');
const sealed = { openai: { store: false, include: ['reasoning.encrypted_content'] } };
const thinking = { anthropic: { thinking: { type: 'enabled', budgetTokens: 1024 } } };
const providerOptions = { responses: {}, sealed, messages: thinking }[endpoint];
let deltas = 0;

async function ask(text, history = []) {
  const messages = [...history, { role: 'user', content: text }];
  const tools = { run_step };
  const given = { model, system, messages, tools, stopWhen: stepCountIs(90), providerOptions, maxOutputTokens: 512 };
  if (how !== 'stream') {
    const result = await generateText(given);
    return [result.text, [...messages, ...result.response.messages]];
  }
  let failed;
  const result = streamText({ ...given, onError: ({ error }) => { failed = error; } });
  for await (const _ of result.textStream) deltas += 1;
  if (failed) throw failed;
  return [await result.text, [...messages, ...(await result.response).messages]];
}

const [greeting] = await ask('Say hello. [[say]]');
const [said, history] = await ask(process.env.TASK ?? 'Run all steps. [[run]]');
const [again] = await ask('And now say hello once more. [[say]]', history);
const { version } = JSON.parse(readFileSync('node_modules/ai/package.json', 'utf8'));
console.log(JSON.stringify({ greeting, said, again, deltas, version }));
